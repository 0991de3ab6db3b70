"""Names: looked up once at a time, remembered with their failures, and never in each other's way."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from kvd.service.sockets import resolver
from kvd.service.sockets.fair_lines import ASKER
from kvd.service.sockets.limits import share_of
from kvd.service.sockets.resolver import MOST_WAITING, THREADS, Address, NameFound, Resolver

HERE: list[Address] = [(socket.AF_INET, "127.0.0.1")]


class Names:
    """Answers for names; of those that end in .dead it says nothing until the end of the test."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.end = threading.Event()
        self.gone = False

    def look(self, host: str) -> list[Address]:
        self.asked.append(host)
        if host.endswith(".dead"):
            self.end.wait(30)
        if self.gone or not host.endswith(".good"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return HERE


def resolved(talk: Callable[[Resolver, Names], Awaitable[None]]) -> None:
    names = Names()

    async def run() -> None:
        await talk(Resolver(names.look), names)
        names.end.set()

    try:
        asyncio.run(run())
    finally:
        names.end.set()


def test_a_name_is_looked_up_once_for_all_who_ask_and_remembered() -> None:
    async def talk(made: Resolver, names: Names) -> None:
        found = await asyncio.gather(*(made.resolve("a.good") for _ in range(20)))
        assert set(found) == {tuple(HERE)}
        assert await made.resolve("a.good") == tuple(HERE)
        assert names.asked == ["a.good"]

    resolved(talk)


def test_whoever_is_cancelled_as_the_answer_comes_goes_on_no_more() -> None:
    """A link that is closed then would be waited for without end."""

    async def talk(made: Resolver, _names: Names) -> None:
        asking = asyncio.create_task(cast("Any", made.resolve("a.dead")))
        await asyncio.sleep(0)
        made._flights["a.dead"].answer.set_result(NameFound(tuple(HERE), "", 0.0))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    resolved(talk)


def test_a_failure_is_remembered_and_says_why() -> None:
    async def talk(made: Resolver, names: Names) -> None:
        for _ in range(3):
            with pytest.raises(OSError, match="'nobody': Name or service not known"):
                await made.resolve("nobody")
        assert names.asked == ["nobody"]

    resolved(talk)


def test_addresses_need_no_look_up() -> None:
    async def talk(made: Resolver, names: Names) -> None:
        assert await made.resolve("127.0.0.1") == ((socket.AF_INET, "127.0.0.1"),)
        assert await made.resolve("::1") == ((socket.AF_INET6, "::1"),)
        assert not names.asked

    resolved(talk)


def test_names_that_nobody_answers_for_leave_room_for_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "RESOLVE_SECONDS", 0.05)

    async def talk(made: Resolver, names: Names) -> None:
        await made.resolve("peer.good")
        monkeypatch.setattr(resolver, "FOUND_SECONDS", 0.0)
        made._found.clear()
        dead = [asyncio.ensure_future(made.resolve(f"{number}.dead")) for number in range(THREADS["new"] + 5)]
        began = time.monotonic()
        assert await made.resolve("peer.good") == tuple(HERE)
        assert names.asked.count("peer.good") == 2
        assert time.monotonic() - began < 1.0
        for failed in dead:
            with pytest.raises(OSError, match="no answer for"):
                await failed

    resolved(talk)


def test_names_that_one_user_asks_for_in_vain_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of names that nobody was found for before, such as those of all peers after a restart."""
    monkeypatch.setattr(resolver, "RESOLVE_SECONDS", 0.5)

    async def talk(made: Resolver, names: Names) -> None:
        ASKER.set("hostile")
        dead = [asyncio.ensure_future(made.resolve(f"{number}.dead")) for number in range(400)]
        await asyncio.sleep(0)
        ASKER.set("honest")
        assert await made.resolve("peer.good") == tuple(HERE)
        await asyncio.gather(*dead, return_exceptions=True)
        began = len(names.asked)
        names.end.set()
        ASKER.set("hostile")
        assert await made.resolve("another.good") == tuple(HERE)
        assert len(names.asked) == began + 1, "nobody waits for the others any more"

    resolved(talk)


def test_names_that_wait_are_not_without_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "RESOLVE_SECONDS", 0.1)

    async def talk(made: Resolver, _names: Names) -> None:
        ASKER.set("hostile")
        most = share_of(MOST_WAITING) + share_of(THREADS["new"])
        dead = [asyncio.ensure_future(made.resolve(f"{number}.dead")) for number in range(most)]
        await asyncio.sleep(0)
        with pytest.raises(OSError, match="768 wait for one user or host already"):
            await made.resolve("one.more")
        ASKER.set("honest")
        with pytest.raises(OSError, match="Name or service not known"):
            await made.resolve("nobody")
        assert await made.resolve("peer.good", kept=True) == tuple(HERE)
        await asyncio.gather(*dead, return_exceptions=True)

    resolved(talk)


def test_a_known_name_keeps_its_last_good_address_while_dns_fails() -> None:
    async def talk(made: Resolver, names: Names) -> None:
        await made.resolve("peer.good")
        names.gone = True
        made._found.clear()
        assert await made.resolve("peer.good") == tuple(HERE)

    resolved(talk)


def test_a_host_without_threads_fails_those_who_ask_now_and_nobody_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def talk(made: Resolver, _names: Names) -> None:
        with monkeypatch.context() as short:
            short.setattr(threading.Thread, "start", full)
            for number in range(THREADS["new"] + 1):
                with pytest.raises(OSError, match="can't start new thread"):
                    await made.resolve(f"{number}.good")
        assert await made.resolve("0.good") == tuple(HERE)
        assert await made.resolve("another.good") == tuple(HERE)

    resolved(talk)


def test_an_error_that_nobody_thought_of_reaches_those_who_wait() -> None:
    def fails(_host: str) -> list[Address]:
        raise ZeroDivisionError("by zero")

    async def run() -> None:
        with pytest.raises(OSError, match="by zero"):
            await Resolver(fails).resolve("peer.good")

    asyncio.run(run())
