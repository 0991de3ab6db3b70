"""From an engine's card, as kvd hands it out, to the geometry that topology is computed on."""

from __future__ import annotations

from kvctl.errors import CheckFailed, PeerTimeout
from kvd.client import cards
from kvd.geometry.codec import decode_worker
from kvd.geometry.errors import GeometryError
from kvd.geometry.model import EngineGeometry
from kvd.wire.identity import EngineFacts, Role
from kvd.wire.query import EngineRow


def engine_geometry(row: EngineRow) -> EngineGeometry:
    """The engine's geometry, all workers decoded.

    Raises `PeerTimeout` when the row has no card and `CheckFailed` when a worker's geometry cannot be read.
    """
    card = row.card
    if card is None:
        raise PeerTimeout(f"engine {row.engine.engine_id!r} is {row.state}: kvd has no card of it")
    workers = []
    for worker in card.workers:
        try:
            workers.append(decode_worker(worker.geometry))
        except GeometryError as error:
            raise CheckFailed(
                f"the geometry of {card.engine.engine_id}/{worker.rank} cannot be read: {error}",
                "kvctl, kvd and the engines' connector should be of one version",
            ) from error
    return cards.engine_geometry(card, tuple(workers))


def engine_facts(engine: EngineGeometry, role: Role) -> EngineFacts:
    """What all workers of an engine of that shape present to kvd."""
    return EngineFacts(
        engine_id=engine.engine_id,
        model=engine.model,
        role=role,
        tp=engine.tp,
        pp=engine.pp,
        dcp=engine.dcp,
        groups=len(engine.workers[0].groups),
        world_size=engine.world_size,
        facts=engine.facts,
    )
