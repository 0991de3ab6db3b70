"""From an engine's card on the wire to its geometry: the one place where the two meet."""

from __future__ import annotations

from kvd.geometry.codec import decode_worker
from kvd.geometry.model import EngineGeometry, WorkerGeometry
from kvd.wire.identity import EngineCard


def engine_geometry(card: EngineCard, workers: tuple[WorkerGeometry, ...] = ()) -> EngineGeometry:
    """The geometry of the engine that a card describes. Raises `kvd.geometry.errors.GeometryError` for a bad one.

    ``workers`` are its workers' geometries in the card's order, where they have been read before.
    """
    return EngineGeometry(
        engine_id=card.engine.engine_id,
        generation=card.generation,
        model=card.engine.model,
        tp=card.engine.tp,
        pp=card.engine.pp,
        dcp=card.engine.dcp,
        workers=workers or tuple(decode_worker(w.geometry) for w in card.workers),
        facts=card.facts,
    )
