"""A peer engine as a worker knows it: its card, and the plan that this worker reads from it by."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.client.cards import engine_geometry
from kvd.geometry.model import WorkerGeometry
from kvd.topology.plan import Plan, plan_worker
from kvd.wire.identity import EngineCard


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer engine's card and the plan to read from it."""

    card: EngineCard
    plan: Plan
    metadata: tuple[bytes, ...]


def meet(card: EngineCard, local: WorkerGeometry, siblings: tuple[WorkerGeometry, ...]) -> Peer:
    """Plan a worker against a peer engine. Raises `GeometryError` or `TopologyError` where they do not fit."""
    plan = plan_worker(local, siblings, engine_geometry(card).workers)
    return Peer(card, plan, tuple(w.metadata for w in card.workers))
