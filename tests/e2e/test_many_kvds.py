"""64 real kvds on one host ($KVDS says how many), which know of each other by one etcd alone.

Engines come and go on all of them. Whatever becomes of etcd, nobody loses a transfer, and engines come and go as ever.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from kvd.wire.query import KvdStatus
from tests.support.daemons import Daemon, measured, wait_for
from tests.support.etcd_kvds import SimulatedEngine, all_there, all_warm, engine, kvds, membership
from tests.support.etcds import NEEDS_ETCD, NEEDS_ETCDCTL, Etcd, etcd
from tests.support.traffic import Traffic

COUNT = int(os.environ.get("KVDS", "64"))
AT_ONCE = 2
"""Engines that come up in the same moment: an interpreter's start is what two cores spend their time with."""
WARM_SECONDS = 5.0
LONG = 60.0
STOPPED_SECONDS = 60.0
"""Six times as long as a host's lease in etcd."""
SLOW = {
    "KVD_PEER_PING_SECONDS": "10",  # they share a core or two: each link is pinged once, and then left alone
    "KVD_PEER_DOWN_SECONDS": "60",
}
pytestmark = [NEEDS_ETCD, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass
class Fleet:
    """One etcd, its kvds, an engine on each of them, prefilling and decoding in turn, and transfers all the time."""

    server: Etcd
    kvds: list[Daemon]
    engines: list[SimulatedEngine]
    traffic: Traffic
    came_up: list[float] = field(default_factory=list)
    """How long all pairs took to be warm each time when engines came up for the first time."""

    def warm(self, seconds: float) -> None:
        """Return when all pairs that should be warm are, and no other."""
        all_warm(self.engines, seconds)

    def goes_on(self) -> None:
        """Transfers go through now; an engine comes up, is warm where it matters, and goes."""
        self.traffic.goes_on()
        another = engine(self.kvds[0], "another", "decode").ready()
        try:
            all_warm([*self.engines, another], WARM_SECONDS)
        finally:
            another.close()
        self.warm(WARM_SECONDS)

    def linked(self) -> bool:
        """Whether each kvd has a link that works to each other one."""
        return all(up(kvd.status()) == len(self.kvds) - 1 for kvd in self.kvds)


def up(status: KvdStatus) -> int:
    return sum(peer.state == "up" for peer in status.peers)


def come_up(made: list[Daemon], number: int) -> SimulatedEngine:
    return engine(made[number], f"e{number}", "decode" if number % 2 else "prefill")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """All kvds are linked, and all engines warm: a few of them come up at once."""
    # Beside other tests it takes longer than a test does, and the stacks of 128 threads would say nothing.
    faulthandler.cancel_dump_traceback_later()
    with (
        etcd() as server,
        kvds(COUNT, server, **SLOW) as made,
        Traffic(made[0], made[1], pause=0.05) as traffic,
    ):
        fleet = Fleet(server, made, [], traffic)
        wait_for(fleet.linked, 120)
        try:
            for first in range(0, COUNT, AT_ONCE):
                came = [come_up(made, number) for number in range(first, min(first + AT_ONCE, COUNT))]
                fleet.engines += came
                fleet.came_up.append(warm_after(came, fleet, LONG))
            yield fleet
        finally:
            for one in fleet.engines:
                one.close()


def warm_after(came: list[SimulatedEngine], fleet: Fleet, seconds: float) -> float:
    """How long it takes after engines came up until all is warm."""
    for one in came:
        one.ready()
    began = time.monotonic()
    fleet.warm(seconds)
    return time.monotonic() - began


def test_all_stand_in_etcd_and_know_each_other(fleet: Fleet) -> None:
    assert all_there(fleet.server, fleet.kvds)
    assert len(fleet.server.hosts()) == COUNT
    assert fleet.linked()


def test_engines_that_come_up_are_warm_with_all_there_are_within_seconds(fleet: Fleet) -> None:
    measured(f"engines come up, {AT_ONCE} at once, and are warm with all there are", max(fleet.came_up))
    assert max(fleet.came_up) < WARM_SECONDS


def test_engines_that_go_are_gone_everywhere_and_warm_when_they_are_back(fleet: Fleet) -> None:
    times = []
    for first in range(0, COUNT, 4 * AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, COUNT))
        for number in numbers:
            fleet.engines[number].close()
        try:
            all_warm([one for at, one in enumerate(fleet.engines) if at not in numbers], WARM_SECONDS)
        finally:
            for number in numbers:
                fleet.engines[number] = come_up(fleet.kvds, number)
        times.append(warm_after([fleet.engines[number] for number in numbers], fleet, WARM_SECONDS))
    measured(f"{AT_ONCE} engines that come back are warm with all", max(times))
    fleet.traffic.goes_on()


def test_a_kvd_that_starts_again_is_linked_to_all_and_its_engine_warm(fleet: Fleet) -> None:
    fleet.kvds[-1].kill()
    began = time.monotonic()
    fleet.kvds[-1].start()
    wait_for(fleet.linked, 60)
    measured("a kvd that starts again is linked to all others", time.monotonic() - began)
    fleet.warm(60)


def killed(fleet: Fleet) -> None:
    """It is away for some seconds."""
    fleet.server.kill()
    wait_for(lambda: all(membership(kvd).state == "away" for kvd in fleet.kvds), 30)
    fleet.goes_on()
    fleet.server.start()


def stopped(fleet: Fleet) -> None:
    """It hangs for a minute: all leases have ended when it goes on."""
    fleet.server.signal(signal.SIGSTOP)
    ends = time.monotonic() + STOPPED_SECONDS
    wait_for(lambda: all(membership(kvd).state == "away" for kvd in fleet.kvds), 30)
    fleet.goes_on()
    wait_for(lambda: time.monotonic() >= ends, STOPPED_SECONDS)
    fleet.goes_on()
    fleet.server.signal(signal.SIGCONT)


def compacted(fleet: Fleet) -> None:
    """It forgets the past, and what was watched with it."""
    fleet.server.kill()
    fleet.server.start()
    for _ in range(20):
        fleet.server.put("other", "{}")
    fleet.server.delete("other")
    fleet.server.compact()
    fleet.goes_on()


def restored(fleet: Fleet) -> None:
    """It comes back with a snapshot of the time before one of the kvds was where it is now."""
    snapshot = fleet.server.save()
    fleet.kvds[-1].kill()
    fleet.kvds[-1].start()
    wait_for(lambda: all_there(fleet.server, fleet.kvds) and fleet.linked(), 60)
    fleet.warm(60)
    fleet.server.kill()
    fleet.server.restore(snapshot)
    fleet.goes_on()
    fleet.server.start()


@pytest.mark.parametrize(
    "what",
    [killed, stopped, compacted, pytest.param(restored, marks=NEEDS_ETCDCTL)],
    ids=lambda what: what.__name__,
)
def test_transfers_go_through_and_engines_are_warm(fleet: Fleet, what: Callable[[Fleet], None]) -> None:
    lost = len(fleet.traffic.lost)
    try:
        what(fleet)
    finally:
        fleet.server.go_on()  # also where that failed: the next fault has a test of its own
    began = time.monotonic()
    known = ("known", 0)
    wait_for(
        lambda: all((member.state, member.vanished) == known for member in map(membership, fleet.kvds)), 60
    )
    wait_for(lambda: all_there(fleet.server, fleet.kvds), 60)
    measured(f"etcd that was {what.__name__} has all hosts again", time.monotonic() - began)
    fleet.goes_on()
    wait_for(fleet.linked, 60)
    assert fleet.traffic.lost[lost:] == []
    ports = [kvd.port for kvd in fleet.kvds[:-1]]
    for kvd in fleet.kvds[:-1]:
        assert not [port for port in ports if f":{port} is forgotten" in kvd.log]
        assert kvd.status().counters.get("errors.internal", 0) == 0
