"""Who of two engines exchanges anything with whom, found in the process that compares them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from kvd.geometry.alike import kind_of
from kvd.geometry.errors import GeometryError
from kvd.geometry.model import EngineGeometry, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.service.peers.comparer.messages import Exchange
from kvd.topology.errors import TopologyError
from kvd.topology.plan import Cuts, sources_of
from kvd.wire.handshake import PART_WORKERS, EngineLayout, WorkerKind
from kvd.wire.identity import WorkerCard

EXCHANGE_SECONDS = 0.5
"""Time on a processor after which it is not looked for any more. 64 and 64 workers take 0.01."""
MOST_LAYOUT = 256 << 10
"""Bytes of a layout: eight kinds of worker of 80 layers have 50 KB."""
MOST_PARTNERS = 1 << 14
"""Partners of all workers of an engine together: 64 that read from 64 others have 64, or 128 with push."""


class KindsRead:
    """The workers of an engine by kind, as they are read: those that were read as alike share one tuple of groups.

    What memory they have decides only whether the groups fit into it, which reading has shown.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[int, int, str], tuple[int, WorkerCard]] = {}
        self._of: list[int] = []

    def add(self, worker: WorkerCard, geometry: WorkerGeometry) -> None:
        """The next worker of the card. Whoever has the geometries keeps them as long as this."""
        alike = id(geometry.groups), geometry.num_blocks, worker.backend
        kind, _ = self._first.setdefault(alike, (len(self._first), worker))
        self._of.append(kind)

    def layout(self, workers: Sequence[WorkerGeometry]) -> bytes:
        """The encoded layout of these ``workers``; empty where it is large, or documents are of another form."""
        kinds, size = [], 0
        for _, worker in self._first.values():
            size += len(worker.geometry)
            if size > MOST_LAYOUT or (kind := kind_of(worker.geometry)) is None:
                return b""
            kinds.append(WorkerKind(*kind, worker.backend))
        ranks = tuple(worker.rank for worker in workers)
        return msgspec.msgpack.encode(EngineLayout(tuple(kinds), ranks, tuple(self._of)))


def find_exchange(
    local: EngineGeometry, peer: EngineGeometry, kinds: KindsRead, *, pushes: bool
) -> Exchange | None:
    """Who of ``local`` reads from whom of ``peer``, and with ``pushes`` writes to whom.

    None where that is more than is worth keeping, takes too long to find, or is not certain to be what the workers
    plan. ``kinds`` are the peer's.
    """
    if max(len(local.workers), len(peer.workers)) > PART_WORKERS or not (_by_tp(local) and _by_tp(peer)):
        return None
    until = time.process_time() + EXCHANGE_SECONDS
    found = [set[int]() for _ in local.workers]
    try:
        if not (layout := kinds.layout(peer.workers)):
            return None
        if not _gather(local.workers, peer.workers, found, until, written=False):
            return None
        if pushes and not _gather(peer.workers, local.workers, found, until, written=True):
            return None
    except (GeometryError, TopologyError, MemoryError):
        return None  # such as where a part of what the peer would read is on nobody here
    return Exchange(layout, tuple(tuple(sorted(partners)) for partners in found))


def _by_tp(engine: EngineGeometry) -> bool:
    """Whether its workers differ in their tensor-parallel rank alone, and stand in its order.

    Replicas share the work by their positions among all workers that a plan is made with. A worker plans with its own
    pipeline stage, by tensor-parallel rank (`kvd.vllm.memory.tensors.sibling_geometries`). A card is ordered by
    pipeline stage, then by decode-context rank. Only here are the two the same.
    """
    ranks = [worker.rank for worker in engine.workers]
    return (engine.tp, engine.pp, engine.dcp) == (len(ranks), 1, 1) and ranks == [
        Rank(tp=tp) for tp in range(len(ranks))
    ]


def _gather(
    readers: Sequence[WorkerGeometry],
    remotes: Sequence[WorkerGeometry],
    found: list[set[int]],
    until: float,
    *,
    written: bool,
) -> bool:
    """Add whom each of ``readers`` reads from. ``written``: they are the peer's, ``found`` is of the other side.

    False where it is too much, or takes too long.
    """
    cuts, count = Cuts(), sum(map(len, found))
    for at, reader in enumerate(readers):
        sources = sources_of(reader, readers, remotes, cuts)
        for source in sources:
            mine, theirs = (source, at) if written else (at, source)
            found[mine].add(theirs)
        count += len(sources)
        if count > MOST_PARTNERS or time.process_time() > until:
            return False
    return True
