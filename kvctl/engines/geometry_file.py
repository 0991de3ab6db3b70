"""The Geometry document: one engine's KV cache, byte for byte; what `kvctl export-geometry` writes and others read."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvctl.cli.units import SCHEMA_VERSION, Count, Scalar, filled
from kvd.geometry.codec import worker_from_plain, worker_to_plain
from kvd.geometry.errors import BadGeometry
from kvd.geometry.model import EngineGeometry


class Geometry(Struct, frozen=True, kw_only=True):
    """One engine's KV cache, byte for byte."""

    engine_id: str
    generation: str
    model: str
    tp: Count
    pp: Count
    dcp: Count
    facts: Annotated[dict[str, Scalar], Meta(description="what compatibility is decided on")]
    workers: Annotated[
        tuple[dict[str, Any], ...],
        Meta(description="rank, regions, pages with their fields and axes, groups with their layers"),
    ]


def geometry_document(engine: EngineGeometry) -> Geometry:
    """The document of an engine."""
    return filled(Geometry, engine, workers=tuple(map(worker_to_plain, engine.workers)))


def is_geometry(plain: object) -> bool:
    """Whether a parsed file claims to be such a document."""
    return isinstance(plain, dict) and plain.get("kind") == "Geometry"


def engine_of(plain: dict[str, Any]) -> EngineGeometry:
    """The engine of a parsed document. Raises `GeometryError` that says what is wrong with it."""
    if plain.get("schema_version") != SCHEMA_VERSION:
        raise BadGeometry(
            f"schema_version {plain.get('schema_version')!r}; this kvctl reads {SCHEMA_VERSION}"
        )
    try:
        body = msgspec.convert(plain, Geometry)
    except msgspec.ValidationError as error:
        raise BadGeometry(str(error)) from None
    workers = tuple(map(worker_from_plain, body.workers))
    ranks = [worker.rank for worker in workers]
    for rank in ranks:
        if ranks.count(rank) > 1:
            raise BadGeometry(f"worker {rank} stands there {ranks.count(rank)} times")
    return EngineGeometry(
        body.engine_id, body.generation, body.model, body.tp, body.pp, body.dcp, workers, body.facts
    )
