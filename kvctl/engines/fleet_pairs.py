"""Pairs of engines of many hosts: engines whose caches are alike are one kind, so that a pair is described once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvctl.cli.parsing import near_misses
from kvctl.engines.cards import engine_geometry
from kvctl.errors import UsageError
from kvd.geometry.model import EngineGeometry
from kvd.wire.query import EngineRow


@dataclass(frozen=True)
class EngineKind:
    """Engines that read and are read alike: their ids with their hosts, and the caches of the first two."""

    role: str
    model: str
    engines: list[tuple[str, str]] = field(default_factory=list)
    caches: list[EngineGeometry] = field(default_factory=list)


KindPair = tuple[EngineKind, EngineKind]


def fleet_pairs(rows: Mapping[str, Sequence[EngineRow]], named: Sequence[str]) -> list[KindPair]:
    """The pairs (reader, source) that roles and models suggest, of the engines of each host that have a card.

    ``named``: one engine, of which alone the pairs are, or two, of which the first reads from the second whatever their
    roles. Raises `UsageError` for an engine that no host has, `KvctlError` for a cache that cannot be read.
    """
    kinds = _kinds(rows, named)
    chosen = [_of(name, rows, kinds) for name in named]
    if len(chosen) == 2:
        return [(chosen[0], chosen[1])]
    return [pair for pair in _suggested(kinds) if not chosen or chosen[0] in pair]


def caches_of(pair: KindPair) -> tuple[EngineGeometry, EngineGeometry]:
    """One cache of each side; two of one kind where it reads from itself."""
    reader, source = pair
    return reader.caches[0], source.caches[-1]


def _kinds(rows: Mapping[str, Sequence[EngineRow]], named: Sequence[str]) -> list[EngineKind]:
    """Who is named is a kind of its own."""
    found: dict[object, EngineKind] = {}
    for host, listed in rows.items():
        for row in listed:
            if row.card is None:
                continue
            cache, name = engine_geometry(row), row.engine.engine_id
            key = (row.engine.role, _alike(cache), name if name in named else "")
            kind = found.setdefault(key, EngineKind(row.engine.role, row.engine.model))
            kind.engines.append((name, host))
            if len(kind.caches) < 2:
                kind.caches.append(cache)
    return list(found.values())


def _alike(cache: EngineGeometry) -> object:
    """What decides who reads which bytes: not where they lie, and not how many blocks there are."""
    return (
        cache.model,
        (cache.tp, cache.pp, cache.dcp),
        tuple(sorted((name, str(value)) for name, value in cache.facts.items())),
        tuple(
            (
                worker.rank,
                {region.device for region in worker.regions} == {"cpu"},
                tuple(
                    (
                        group.index,
                        group.kind,
                        group.block_size,
                        tuple((one.name, one.page) for one in group.layers),
                    )
                    for group in worker.groups
                ),
            )
            for worker in cache.workers
        ),
    )


def _suggested(kinds: Sequence[EngineKind]) -> Iterator[KindPair]:
    for reader in kinds:
        for source in kinds:
            if (
                reader.role in ("decode", "both")
                and source.role in ("prefill", "both")
                and reader.model == source.model
                and (reader is not source or len(reader.engines) > 1)
            ):
                yield reader, source


def _of(name: str, rows: Mapping[str, Sequence[EngineRow]], kinds: Sequence[EngineKind]) -> EngineKind:
    for kind in kinds:
        if any(name == engine for engine, _ in kind.engines):
            return kind
    known = [row.engine.engine_id for listed in rows.values() for row in listed]
    if name in known:
        raise UsageError(
            f"engine {name!r} is not complete, so nobody knows its cache",
            f"kvctl engines --fleet --filter engine={name}",
        )
    raise UsageError(
        f"no host that answered has an engine {name!r}; {near_misses(name, known[:50]) or 'they have none at all'}",
        "kvctl engines --fleet lists them",
    )
