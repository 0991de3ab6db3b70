"""A peer engine as a worker knows it: its card, the plan that this worker reads from it by, and the lane to it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvd.backends.contract import Backend, Lane
from kvd.client.cards import engine_geometry
from kvd.geometry.model import WorkerGeometry
from kvd.topology.plan import Plan, plan_worker
from kvd.wire.identity import EngineCard

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer engine's card and the plan to read from it.

    ``devices`` are those of all memory that takes part, ours first.
    """

    card: EngineCard
    plan: Plan
    metadata: tuple[bytes, ...]
    devices: tuple[str, ...]


def meet(card: EngineCard, local: WorkerGeometry, siblings: tuple[WorkerGeometry, ...]) -> Peer:
    """Plan a worker against a peer engine. Raises `GeometryError` or `TopologyError` where they do not fit."""
    remotes = engine_geometry(card).workers
    plan = plan_worker(local, siblings, remotes)
    sides = (local, *(remotes[position] for position in plan.sources))
    devices = tuple(region.device for worker in sides for region in worker.regions)
    return Peer(card, plan, tuple(w.metadata for w in card.workers), devices)


def connect(backend: Backend, peer: Peer) -> Lane:
    """A lane to all workers that the plan reads from. Raises `BackendError`; half a lane is none, and is destroyed."""
    engine_id = peer.card.engine.engine_id
    lane = backend.lane(engine_id)
    try:
        for index in peer.plan.sources:
            lane.add(str(peer.plan.remote_ranks[index]), peer.metadata[index])
    except Exception:  # whatever it is goes on to the caller
        destroy(lane, engine_id)
        raise
    return lane


def destroy(lane: Lane, engine_id: str) -> str:
    """Why the lane still lives, or nothing."""
    try:
        lane.close()
    except Exception as error:
        log.exception("lane to %s could not be destroyed", engine_id)
        return f"the lane to {engine_id} could not be destroyed: {error}"
    return ""
