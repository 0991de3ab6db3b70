"""Many real kvds on one host, which know of each other by one etcd alone: 12, or as many as $KVDS says."""

from __future__ import annotations

import os
import time

import pytest

from kvd.wire.query import KvdStatus
from tests.support.daemons import Daemon, measured, wait_for
from tests.support.etcd_kvds import SimulatedEngine, all_warm, engine, kvds
from tests.support.etcds import NEEDS_ETCD, etcd

COUNT = int(os.environ.get("KVDS", "12"))
SLOW = {
    "KVD_PEER_PING_SECONDS": "10",  # they share a core or two: each link is pinged once, and then left alone
    "KVD_PEER_DOWN_SECONDS": "60",
}


def up(status: KvdStatus) -> int:
    return sum(peer.state == "up" for peer in status.peers)


@NEEDS_ETCD
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_many_kvds_find_each_other() -> None:
    began = time.monotonic()
    with etcd() as server, kvds(COUNT, server, **SLOW) as made:
        measured(f"{COUNT} kvds serve", time.monotonic() - began)
        wait_for(lambda: len(server.hosts()) == COUNT, 120)
        measured("all of them stand in etcd", time.monotonic() - began)
        waiting: list[Daemon] = made
        deadline = time.monotonic() + 120
        while waiting:
            waiting = [kvd for kvd in waiting if up(kvd.status()) < COUNT - 1]
            assert time.monotonic() < deadline, f"{len(waiting)} kvds are not linked to all others"
        measured("each is linked to all others", time.monotonic() - began)
        began = time.monotonic()
        made[0].kill()
        made[0].start()
        wait_for(lambda: up(made[0].status()) == COUNT - 1, 60)
        measured("one that starts again is linked to all others", time.monotonic() - began)
        _engines_come_and_go(made)
        for kvd in made:
            assert kvd.status().counters.get("errors.internal", 0) == 0


def _engines_come_and_go(made: list[Daemon]) -> None:
    """All pairs that should be warm are, when engines come up on all kvds at once, and when some go and come back."""
    engines: list[SimulatedEngine] = []

    def up(number: int) -> SimulatedEngine:
        return engine(made[number], f"e{number}", "decode" if number % 2 else "prefill")

    try:
        engines += map(up, range(COUNT))
        for one in engines:
            one.ready(60)
        began = time.monotonic()
        measured("all pairs of engines that came up are warm", max(0.0, all_warm(engines, 60) - began))
        going = range(0, COUNT, 4)
        for number in going:
            engines[number].close()
        began = time.monotonic()
        stay = [one for number, one in enumerate(engines) if number not in going]
        measured("all know that these engines are gone", all_warm(stay, 60) - began)
        for number in going:
            engines[number] = up(number)
        for number in going:
            engines[number].ready(60)
        began = time.monotonic()
        measured("all pairs are warm again", max(0.0, all_warm(engines, 60) - began))
    finally:
        for one in engines:
            one.close()
