"""Members by DNS: every address of a name is a kvd, and a name that fails changes nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvd.service.config import DnsSettings
from kvd.service.membership import dns
from kvd.service.membership.ourselves import listens_at
from kvd.service.membership.told import ToldHost
from kvd.service.sockets.resolver import Address, Resolver
from kvd.wire.identity import Endpoint
from tests.support.daemons import ROOT, Daemon, daemons, facts, scheduler, session, wait_for, worker
from tests.support.ports import free_port

SETTINGS = DnsSettings(name="fleet.test:9401", every_seconds=0.001)


class Heard:
    """Takes what a source tells."""

    def __init__(self) -> None:
        self.answers: list[list[Endpoint]] = []
        self.failures: list[str] = []
        self.refused: list[str] = []

    def take(self, hosts: Iterable[ToldHost], *, full: bool = True, trouble: str = "") -> None:
        assert (full, trouble) == (True, "")
        self.answers.append([host.endpoint for host in hosts])

    def away(self, reason: str) -> None:
        self.failures.append(reason)

    def wrong(self, what: str, _kind: str = "value") -> None:
        self.refused.append(what)


def followed(
    look: Callable[[str], Sequence[Address]], enough: Callable[[Heard], bool], ours: tuple[str, int] = ("", 0)
) -> Heard:
    """What was told until it was enough."""

    async def run() -> Heard:
        heard, resolver = Heard(), Resolver(lambda host: list(look(host)))
        task = asyncio.create_task(
            dns.follow(SETTINGS, resolver.look_again, lambda h, p: listens_at(ours, h, p), heard)
        )
        async with asyncio.timeout(10):
            while not enough(heard):  # noqa: ASYNC110 - what was told announces nothing
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return heard

    return asyncio.run(run())


def v4(*addresses: str) -> list[Address]:
    return [(socket.AF_INET, address) for address in addresses]


def test_all_addresses_of_both_kinds_are_members_but_ours() -> None:
    found = [*v4("10.0.0.1", "10.0.0.2", "10.0.0.2"), (socket.AF_INET6, "2001:db8::1")]
    heard = followed(lambda _: found, lambda heard: bool(heard.answers), ours=("10.0.0.1", 9401))
    assert heard.answers[0] == [Endpoint("10.0.0.2", 9401), Endpoint("2001:db8::1", 9401)]


def test_a_name_that_fails_is_told_as_that_and_asked_again() -> None:
    answers: list[list[Address]] = [v4("10.0.0.2"), [], [], v4("10.0.0.3")]

    def look(_host: str) -> list[Address]:
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if not found:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return found

    heard = followed(look, lambda heard: len(heard.answers) > 1)
    assert heard.answers[:2] == [[Endpoint("10.0.0.2", 9401)], [Endpoint("10.0.0.3", 9401)]]
    assert "Temporary failure" in heard.failures[0]


def test_addresses_of_nobody_are_left_out() -> None:
    heard = followed(lambda _: v4("0.0.0.0", "10.0.0.2"), lambda heard: bool(heard.answers))  # noqa: S104
    assert heard.answers[0] == [Endpoint("10.0.0.2", 9401)]
    assert "no host" in heard.refused[0]


def test_a_wildcard_is_ours_at_each_address_of_this_host_and_at_no_other() -> None:
    everywhere = ("0.0.0.0", 9401)  # noqa: S104
    assert listens_at(everywhere, "127.0.0.1", 9401)
    assert not listens_at(everywhere, "127.0.0.1", 9402)
    assert not listens_at(everywhere, "192.0.2.1", 9401)
    assert not listens_at(("127.0.0.1", 9401), "127.0.0.2", 9401)


def test_a_dns_that_hangs_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.service.sockets.resolver.RESOLVE_SECONDS", 0.05)
    calls: list[str] = []
    over = threading.Event()

    def look(host: str) -> list[Address]:
        calls.append(host)
        over.wait(30)
        return v4("10.0.0.2")

    def enough(heard: Heard) -> bool:
        if len(heard.failures) > 5:
            over.set()
        return over.is_set()

    heard = followed(look, enough)
    assert "no answer" in heard.failures[0]
    assert len(calls) == 1, "one look-up hangs, and no second one is begun beside it"


@contextmanager
def named(*addresses: str) -> Iterator[tuple[list[Daemon], Callable[..., None]]]:
    """Kvds at these addresses with one port, for which ``fleet.test`` is what a test says."""
    with tempfile.TemporaryDirectory(prefix="kvd-") as place, ExitStack() as stack:
        names, port = Path(place) / "names.json", free_port()

        def say(*found: str) -> None:
            new = names.with_suffix(".new")
            new.write_text(json.dumps({"fleet.test": found}))
            new.rename(names)

        say(*addresses)
        made = []
        for number, address in enumerate(addresses):
            by = (sys.executable, str(ROOT / "tests" / "support" / "named_hosts.py"), str(names))
            kvd = Daemon(Path(place) / f"d{number}", host=address, port=port, by=by)
            kvd.environment = {
                "KVD_MEMBERSHIP_SOURCE": "dns",
                "KVD_MEMBERSHIP_DNS_NAME": f"fleet.test:{port}",
                "KVD_MEMBERSHIP_DNS_EVERY_SECONDS": "0.1",
            }
            stack.callback(kvd.kill)
            made.append(kvd.start())
        yield made, say


def members(kvd: Daemon) -> int:
    row = kvd.status().membership
    assert row is not None
    return row.members


def state(kvd: Daemon) -> str:
    row = kvd.status().membership
    assert row is not None
    return row.state


def test_kvds_of_one_name_find_each_other_and_keep_each_other_whatever_becomes_of_the_name() -> None:
    with named("127.0.0.1", "127.0.0.2") as ((one, other), say):
        with (
            session(one, worker(facts("p"))), session(one, scheduler(facts("p"))),
            session(other, worker(facts("d"))), session(other, scheduler(facts("d"))),
        ):  # fmt: skip
            wait_for(lambda: other.engines().get("p") and other.engines()["p"].peers == ("d",))
            assert members(one) == members(other) == 1, "nobody is linked to itself"
            say()
            wait_for(lambda: state(one) == "away")
            assert members(one) == 1
            say("127.0.0.1")
            wait_for(lambda: state(one) == "known")
            wait_for(lambda: (row := one.status().membership) and row.vanished == 1)
            assert other.engines()["p"].state == "ready"
        other.kill()
        wait_for(lambda: members(one) == 0, 40)
        assert "is forgotten: dns does not name it any more" in one.log


def test_a_real_name_leads_to_a_kvd() -> None:
    with daemons(1) as (one,), tempfile.TemporaryDirectory(prefix="kvd-") as place:
        other = Daemon(Path(place) / "d")
        other.environment = {
            "KVD_MEMBERSHIP_SOURCE": "dns",
            "KVD_MEMBERSHIP_DNS_NAME": f"localhost:{one.port}",
        }
        try:
            other.start()
            wait_for(
                lambda: (
                    {str(p.endpoint): p.state for p in other.status().peers}.get(str(one.endpoint)) == "up"
                )
            )
        finally:
            other.kill()
