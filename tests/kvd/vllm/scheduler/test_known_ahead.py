"""The first request of a pair that two kvds introduced to each other pays no handshake: 0 in the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from kvd.backends.memory import open_backend
from kvd.client.session import KvdSession
from kvd.vllm.memory.tensors import sibling_geometries, worker_geometry
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.transfer import ListTransfers, TransferList
from kvd.worker.orders import StepOrders
from kvd.worker.settings import ConnectorSettings
from kvd.worker.worker import WorkerHalf
from tests.support.daemons import Daemon, daemons, scheduler, session, wait_for
from tests.support.rigs.bench import cache_config, facts, full, groups_of, order, place, prefill
from tests.support.rigs.pull import BLOCKS, ELEMENTS, Buffer, gather, memory

LONG = 30.0


@contextmanager
def worker(kvd: Daemon, name: str) -> Iterator[tuple[Buffer, WorkerHalf, KvdSession]]:
    """The connector's half of a worker, with a session of its own at a kvd."""
    config = cache_config(BLOCKS, (full(), ("l0", "l1")))
    buffer, tensors = memory(2)
    groups = groups_of(config)
    sessions: list[KvdSession] = []

    def open_session(card: Any, on_push: Any) -> KvdSession:
        sessions.append(KvdSession(card, on_push, directory=kvd.directory, name=name))
        return sessions[0]

    half = WorkerHalf(
        ConnectorSettings(backend="memory"),
        facts(name, len(groups)),
        worker_geometry(tensors, config, groups, place()),
        sibling_geometries(tensors, config, groups, place()),
        open_backend(name, options={}),
        open_session,
        memory=tensors,
    )
    try:
        yield buffer, half, sessions[0]
    finally:
        half.close()


def test_the_first_request_of_configured_peers_pays_no_handshake() -> None:
    with (
        daemons(1) as (far,),
        daemons(1) as (near,),
        worker(far, "p") as (source, _, prefiller),
        session(far, scheduler(facts("p"))),
    ):
        near.kill()
        near.environment["KVD_PEER_CONNECT"] = f"127.0.0.1:{far.port}"
        near.start()
        generation = prefiller.wait(lambda s: bool(s.engine_generation), LONG).engine_generation
        source[:] = np.arange(len(source)) % 65535 + 1
        with worker(near, "d") as (target, decoder, _), session(near, scheduler(facts("d"))) as chief:
            wait_for(lambda: decoder.topology.find("p"), LONG)
            wait_for(lambda: chief.counters["pushed.peer_ready"], LONG)
            asked = GetPeer(local_engine="d", engine_id="p", endpoint=far.endpoint, generation=generation)
            known = chief.call(asked, LONG).result(LONG)
            assert isinstance(known, PeerReady)
            before = near.status().counters["received.get_peer"]

            null = target.reshape(2, BLOCKS, ELEMENTS)[:, 0]
            wait_for(null.all, LONG)  # it has connected too
            assert not target.reshape(2, BLOCKS, ELEMENTS)[:, 1:].any()
            remote = prefill(((2, 3),), generation=generation)
            load = replace(order(remote, (5, 6), seconds=LONG), handshake_seconds=known.seconds)
            decoder.start(StepOrders(loads=[load]))
            assert not gather(decoder, 1).failed

            assert near.status().counters["received.get_peer"] == before  # the worker had nothing to ask
            there, here = (b.reshape(2, BLOCKS, ELEMENTS) for b in (source, target))
            assert (here[:, [5, 6]] == there[:, [2, 3]]).all()
            (row,) = wait_for(lambda: _transfers(near), LONG)
            assert row.record.state == "done"
            assert row.record.stages["handshake"] == 0


def _transfers(kvd: Daemon) -> tuple[Any, ...]:
    answer = kvd.ask(ListTransfers())
    assert isinstance(answer, TransferList)
    return answer.rows
