"""Which engines that kvd knows are a pair: their roles and models suggest it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvd.wire.query import EngineRow


def suggested(
    rows: Sequence[EngineRow], named: EngineRow | None = None
) -> Iterator[tuple[EngineRow, EngineRow]]:
    """The pairs (reader, source) of ready engines; only those that ``named`` is part of where it is given."""
    for reader in rows:
        for other in rows:
            if _makes_sense(reader, other) and (named is None or named in (reader, other)):
                yield reader, other


def _makes_sense(reader: EngineRow, other: EngineRow) -> bool:
    return (
        reader is not other
        and reader.card is not None
        and other.card is not None
        and reader.engine.role in ("decode", "both")
        and other.engine.role in ("prefill", "both")
        and reader.engine.model == other.engine.model
    )
