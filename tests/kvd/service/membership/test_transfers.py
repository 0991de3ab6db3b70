"""Whatever becomes of etcd, nobody loses a transfer, and engines come and go as ever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.support.daemons import Daemon, measured, wait_for
from tests.support.etcd_kvds import all_linked, all_there, engine, kvds, membership
from tests.support.etcds import NEEDS_ETCD, NEEDS_ETCDCTL, Etcd, etcd
from tests.support.traffic import Traffic

STOPPED_SECONDS = float(os.environ.get("ETCD_STOPPED_SECONDS", "12"))
"""Longer than a host's lease in etcd; ``ETCD_STOPPED_SECONDS=60`` for a minute."""
pytestmark = [NEEDS_ETCD, pytest.mark.slow, pytest.mark.timeout(400)]


def known(made: list[Daemon]) -> bool:
    return all(membership(kvd).state == "known" for kvd in made)


def killed(server: Etcd, goes_on: Callable[[], None], made: list[Daemon]) -> None:
    """It is away for some seconds."""
    server.kill()
    wait_for(lambda: all(membership(kvd).state == "away" for kvd in made), 30)
    goes_on()
    server.start()


def stopped(server: Etcd, goes_on: Callable[[], None], made: list[Daemon]) -> None:
    """It hangs, for longer than all leases, which have ended when it goes on."""
    server.signal(signal.SIGSTOP)
    ends = time.monotonic() + STOPPED_SECONDS
    wait_for(lambda: all(membership(kvd).state == "away" for kvd in made), 30)
    while time.monotonic() < ends:
        goes_on()
    server.signal(signal.SIGCONT)


def compacted(server: Etcd, goes_on: Callable[[], None], _made: list[Daemon]) -> None:
    """It forgets the past, and what was watched with it."""
    server.kill()
    server.start()
    for _ in range(20):
        server.put("other", "{}")
    server.delete("other")
    server.compact()
    goes_on()


def restored(server: Etcd, goes_on: Callable[[], None], made: list[Daemon]) -> None:
    """It comes back with a snapshot of the time before one of the kvds was there."""
    snapshot = server.save()
    made[-1].kill()
    made[-1].start()
    wait_for(lambda: all_there(server, made) and all_linked(made), 30)
    server.kill()
    server.restore(snapshot)
    goes_on()
    server.start()


@contextmanager
def fleet() -> Iterator[tuple[Etcd, list[Daemon], Traffic]]:
    """Four kvds that know each other by etcd, and transfers from the first to the second."""
    with etcd() as server, kvds(4, server) as made:
        wait_for(lambda: all_linked(made), 30)
        wait_for(lambda: all_there(server, made), 30)
        with Traffic(made[0], made[1]) as traffic:
            traffic.goes_on()
            yield server, made, traffic


@pytest.mark.parametrize(
    "what",
    [killed, stopped, compacted, pytest.param(restored, marks=NEEDS_ETCDCTL)],
    ids=lambda what: what.__name__,
)
def test_transfers_go_through_and_engines_are_warm(
    what: Callable[[Etcd, Callable[[], None], list[Daemon]], None],
) -> None:
    with fleet() as (server, made, traffic):
        came = [engine(made[2], "e", "decode"), engine(made[3], "f", "prefill")]
        for one in came:
            one.ready()

        def goes_on() -> None:
            """Transfers go through now; an engine comes up, is known where it matters, and goes."""
            traffic.goes_on()
            another = engine(made[0], "g", "decode").ready()
            f = came[1].clients[0]
            f.wait(lambda peers: peers.get("g") == another.generation, time.monotonic() + 20)
            another.close()
            f.wait(lambda peers: "g" not in peers, time.monotonic() + 20)

        try:
            what(server, goes_on, made)
            began = time.monotonic()
            wait_for(lambda: known(made) and all_there(server, made), 60)
            measured(f"etcd that was {what.__name__} has all hosts again", time.monotonic() - began)
            goes_on()
            wait_for(lambda: all(membership(kvd).vanished == 0 for kvd in made), 30)
            wait_for(lambda: all_linked(made), 30)
        finally:
            for one in came:
                one.close()
        assert traffic.lost == []
        for kvd in made[:3]:
            assert not [other.port for other in made[:3] if f":{other.port} is forgotten" in kvd.log]
