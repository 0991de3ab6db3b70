"""The Caches document: what `kvctl cache` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from kvctl.cli.numbers import size
from kvctl.cli.units import Bytes, Count, filled
from kvctl.views.folded.rows import listing
from kvctl.views.registry import View, named
from kvctl.views.screen import Column, ScreenPart, measure, names
from kvd.wire.identity import HERE
from kvd.wire.prefixes.cache import CacheHeld, CacheRow, HintsKnown


class CachedGroup(Struct, frozen=True, kw_only=True):
    """What an engine holds of one KV cache group."""

    kind: str
    block_tokens: Annotated[Count, Meta(description="tokens of a block")]
    blocks: Annotated[Count, Meta(description="complete blocks: others may read them")]


class CacheSource(Struct, frozen=True, kw_only=True):
    """What an engine's workers read of another engine's cache, since kvd was started."""

    source: str
    reads: Annotated[Count, Meta(description="by worker")]
    tokens: Annotated[Count, Meta(description="of its first worker's reads")]
    bytes: Bytes
    lost: Annotated[Count, Meta(description="reads that were not used: PREFIX_LOST")]


class Cache(Struct, frozen=True, kw_only=True):
    """An engine that shares prefixes: what it holds, and what was read of it and by it."""

    engine_id: str
    generation: str
    host: Annotated[str | None, Meta(description="the kvd of an engine that is not here; null: this one")]
    groups: Annotated[tuple[CachedGroup, ...], Meta(description="empty of engines that are not here")]
    blocks: Annotated[Count, Meta(description="complete blocks of all groups")]
    pool: Annotated[Count, Meta(description="blocks that its cache has room for; 0: not known")]
    hints: Annotated[Count | None, Meta(description="its hints that this kvd knows; null: none")]
    hint_tokens: Annotated[Count | None, Meta(description="tokens from one hint of a prompt to the next")]
    told: Annotated[Count, Meta(description="how often somebody was told of a prefix that it holds")]
    busy: Annotated[
        Count,
        Meta(description="questions that it turned down because reads had cost it more than prefix_cost"),
    ]
    kept: Annotated[Count, Meta(description="reads of others, by worker, that were used")]
    lost: Annotated[Count, Meta(description="reads of others whose blocks it needed meanwhile")]
    given_bytes: Annotated[Bytes, Meta(description="bytes of the reads of others that were used")]
    reads: Annotated[Count, Meta(description="what its workers read of others and used")]
    read_bytes: Bytes
    reads_lost: Annotated[Count, Meta(description="what its workers read of others and could not use")]
    sources: tuple[CacheSource, ...]
    trouble: Annotated[str, Meta(description="why its scheduler did not tell what it holds")]

    @property
    def afar(self) -> bool:
        """Whether its hints alone are known."""
        return self.host is not None


class Caches(Struct, frozen=True, kw_only=True):
    """The engines that share prefixes: those of this host, and of others as far as hints are known."""

    caches: tuple[Cache, ...]


def cache_document(row: CacheRow) -> Cache:
    """The document of one row of kvd's answer."""
    held, hints = row.held or CacheHeld(), row.hints or HintsKnown(version=0, tags=0, step=0)
    return Cache(
        engine_id=row.engine_id,
        generation=row.generation,
        host=None if row.endpoint == HERE else str(row.endpoint),
        groups=tuple(filled(CachedGroup, group) for group in held.groups),
        blocks=sum(group.blocks for group in held.groups),
        pool=held.pool,
        hints=hints.tags if row.hints else None,
        hint_tokens=hints.step if row.hints else None,
        told=row.given.told,
        busy=row.given.busy,
        kept=row.given.kept,
        lost=row.given.lost,
        given_bytes=row.given.bytes,
        reads=sum(one.reads for one in row.taken),
        read_bytes=sum(one.bytes for one in row.taken),
        reads_lost=sum(one.lost for one in row.taken),
        sources=tuple(filled(CacheSource, one) for one in row.taken),
        trouble=row.trouble,
    )


def caches_screen(body: Caches, wide: bool) -> ScreenPart:
    """One engine a line."""
    return listing(body.caches, *cache_columns(body.caches, wide))


def cache_columns(caches: Sequence[Cache] = (), wide: bool = False) -> list[Column[Any]]:
    """The columns of engines that share prefixes, their name first."""
    afar = wide or any(cache.host for cache in caches)
    troubled = wide or any(cache.trouble for cache in caches)
    busy = wide or any(cache.busy for cache in caches)
    return [
        names("ENGINE", lambda c: c.engine_id),
        names("HOST", lambda c: c.host or "-", afar),
        names("GENERATION", lambda c: c.generation or "-", wide),
        measure("BLOCKS", lambda c: "-" if c.trouble else _here(c, c.blocks), lambda c: c.blocks),
        measure("OF", lambda c: _here(c, c.pool or "-"), lambda c: c.pool),
        names("GROUPS", lambda c: ", ".join(f"{g.kind} {g.blocks}" for g in c.groups) or "-", wide),
        measure("HINTS", lambda c: "-" if c.hints is None else c.hints, lambda c: c.hints),
        measure("EACH", lambda c: c.hint_tokens or "-", lambda c: c.hint_tokens, wide),
        measure("TOLD", lambda c: _here(c, c.told), lambda c: c.told, wide),
        measure("BUSY", lambda c: _here(c, c.busy), lambda c: c.busy, busy),
        measure("GIVEN", lambda c: _here(c, c.kept), lambda c: c.kept),
        measure("BYTES", lambda c: _here(c, size(c.given_bytes)), lambda c: c.given_bytes),
        measure("LOST", lambda c: _here(c, c.lost), lambda c: c.lost),
        measure("TAKEN", lambda c: _here(c, c.reads), lambda c: c.reads),
        measure("TAKEN BYTES", lambda c: _here(c, size(c.read_bytes)), lambda c: c.read_bytes),
        measure("MISSED", lambda c: _here(c, c.reads_lost), lambda c: c.reads_lost),
        names("SOURCES", lambda c: ", ".join(one.source for one in c.sources) or "-", wide),
        names("REASON", lambda c: c.trouble or "-", troubled),
    ]


def _here(cache: Cache, value: str | int) -> str | int:
    return "-" if cache.afar else value


VIEWS = (View(Caches, caches_screen, "caches", Cache, named("caches", lambda cache: cache.engine_id)),)
