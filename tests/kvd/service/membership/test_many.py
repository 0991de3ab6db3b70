"""Many real kvds on one host, which know of each other by one etcd alone: 12, or as many as $KVDS says."""

from __future__ import annotations

import os
import time

import pytest

from kvd.wire.query import KvdStatus
from tests.support.daemons import Daemon, measured, wait_for
from tests.support.etcd_kvds import kvds
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
        for kvd in made:
            assert kvd.status().counters.get("errors.internal", 0) == 0
