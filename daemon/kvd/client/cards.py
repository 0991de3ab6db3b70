"""From an engine's card on the wire to its geometry: the one place where the two meet."""

from __future__ import annotations

import msgspec

from kvd.geometry.alike import AlikeReader
from kvd.geometry.model import EngineGeometry, WorkerGeometry
from kvd.wire.identity import EngineCard, EngineFacts


def engine_geometry(
    card: EngineCard, workers: tuple[WorkerGeometry, ...] = (), *, reader: AlikeReader | None = None
) -> EngineGeometry:
    """The geometry of the engine that a card describes. Raises `kvd.geometry.errors.GeometryError` for a bad one.

    ``workers`` are its workers' geometries in the card's order, where they have been read before; ``reader`` may have
    read such of other engines.
    """
    reader = reader or AlikeReader()
    known = workers or tuple(reader.read_document(worker.geometry)[0] for worker in card.workers)
    return described_engine(msgspec.structs.replace(card.engine, facts=card.facts), card.generation, known)


def described_engine(
    engine: EngineFacts, generation: str, workers: tuple[WorkerGeometry, ...]
) -> EngineGeometry:
    """The engine of which these facts are told, with its workers."""
    return EngineGeometry(
        engine_id=engine.engine_id,
        generation=generation,
        model=engine.model,
        tp=engine.tp,
        pp=engine.pp,
        dcp=engine.dcp,
        workers=workers,
        facts=dict(engine.facts),
    )
