"""A peer engine as a worker knows it: its card, and the plan that this worker reads from it by."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.client.cards import engine_geometry
from kvd.geometry.model import WorkerGeometry
from kvd.topology.plan import Plan, plan_worker
from kvd.wire.identity import EngineCard


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
