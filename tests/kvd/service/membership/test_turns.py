"""However many hosts a source names, no turn of the loop takes long: processor time, which other work leaves alone."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Coroutine
from typing import Any, cast

from kvd.service.membership import etcd
from kvd.service.membership import members as members_module
from kvd.service.membership.etcd_client import EtcdClient
from kvd.service.membership.etcd_messages import KeyValue, Range, RangeAnswer, WatchEvent
from kvd.service.membership.told import MOST_MEMBERS
from kvd.wire.identity import Endpoint
from tests.kvd.service.membership.test_dns import Heard
from tests.kvd.service.membership.test_members import Fleet, told
from tests.support.daemons import measured

MOST_SECONDS = 0.02
ME = etcd.ourselves("test", "h0", Endpoint("127.0.0.1", 1), "g", "", "v")


class AnyAnswer(Heard):
    """Takes what a source tells, whatever it is."""

    def take(self, hosts: Any, **_how: Any) -> None:
        self.answers.append([host.endpoint for host in hosts])


def key(number: int, text: str = "") -> KeyValue:
    """A host's key, or what stands there instead."""
    value = text or json.dumps({"address": f"10.{number >> 14}.{(number >> 7) & 127}.{number & 127}:9401"})
    return KeyValue(ME.prefix + b"many-%05d" % number, value.encode())


def longest_turn(what: str, work: Coroutine[Any, Any, None]) -> float:
    """The processor time of the longest turn of a loop, in which this work is done and what it begins."""
    turns: list[float] = []

    async def watched() -> None:
        async def note() -> None:
            while True:
                began = time.thread_time()
                await asyncio.sleep(0)
                turns.append(time.thread_time() - began)

        noting = asyncio.create_task(note())
        await asyncio.sleep(0)
        await work
        for _ in range(200):
            await asyncio.sleep(0)
        noting.cancel()

    gc.disable()  # of this process, which is full of tests
    try:
        asyncio.run(watched())
    finally:
        gc.enable()
    measured(f"longest turn {what}", max(turns))
    return max(turns)


def test_a_change_of_eight_thousand_hosts_is_taken_in_slices() -> None:
    view, heard = etcd.EtcdView(), AnyAnswer()
    events = tuple(WatchEvent(key(number, "no host" if number % 2 else "")) for number in range(8000))
    took = longest_turn("with a change of 8,000 hosts", etcd._take(ME, view, heard, events))
    assert len(view.hosts) == 8000
    assert len(heard.refused) == 4000
    assert took < MOST_SECONDS


def test_all_hosts_are_read_in_slices() -> None:
    class Pages:
        """Stands for etcd's client: eight thousand keys, half of them of no host."""

        async def ask(self, question: Range, _answer: type[RangeAnswer]) -> RangeAnswer:
            await asyncio.sleep(0)  # as for each answer of the real one, which comes over a connection
            after = question.key.rstrip(b"\0")
            first = int(after[-5:]) + 1 if after != ME.prefix else 0
            kvs = tuple(key(n, "no host" if n % 2 else "") for n in range(first, first + question.limit))
            return RangeAnswer(kvs=kvs, more=first + question.limit < 8000)

    view, heard = etcd.EtcdView(), AnyAnswer()

    async def work() -> None:
        await etcd._read_all(ME, cast("EtcdClient", Pages()), view, heard)

    took = longest_turn("while 8,000 hosts are read", work())
    assert len(view.hosts) >= 8000
    assert took < MOST_SECONDS


def test_thousands_of_members_come_and_go_in_slices(monkeypatch: Any) -> None:
    monkeypatch.setattr(members_module, "FORGET_SECONDS", 0.0)
    many = [Endpoint(f"10.1.{number >> 8}.{number & 255}", 9401) for number in range(5000)]

    async def work() -> None:
        fleet = Fleet()
        fleet.members.take(told(*many))
        await fleet.members.look()
        await asyncio.sleep(0)
        assert len(fleet.looked) == MOST_MEMBERS
        fleet.members.take(told(*many[:10]))
        await fleet.members.look()
        await asyncio.sleep(0)
        assert len(fleet.looked) == 10

    assert longest_turn("while 4,096 members come and go", work()) < MOST_SECONDS
