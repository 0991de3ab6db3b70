"""Handshake: what one engine must know of another, fetched once for each (peer engine, generation)."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvd.geometry.rank import Rank
from kvd.wire.identity import Endpoint, EngineCard
from kvd.wire.limits import MOST_ENGINES, Blob, Count, Id, Seconds, Text, Whole
from kvd.wire.reply import Reply, Request

Generations: TypeAlias = Annotated[tuple[tuple[Id, Id], ...], Meta(max_length=MOST_ENGINES)]
"""Engines: id and generation."""
MOST_SILENT = 64
"""Kvds that a ping or its answer calls silent."""
Silent: TypeAlias = Annotated[tuple[tuple[Id, Seconds], ...], Meta(max_length=MOST_SILENT)]
"""Kvds that do not answer: the generation of each, and for how long."""
PART_WORKERS = 1024
"""Most workers of a part, however small they are: making their objects takes a loop's time."""


class CardRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A worker in a `CardPart`: as its card, without what it shares with others.

    Its geometry is ``head`` and then the part's tail of number ``tail`` (`kvd.geometry.alike`). In a `CardOutline` its
    tail is that of its kind, and ``tail`` is 0.
    """

    rank: Rank
    incarnation: Id
    pid: Whole
    host: Id
    backend: Id
    head: Blob
    tail: Count
    metadata: Blob


class CardPart(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of an engine's card from number ``first`` on, of ``total``; what is alike of them stands there once.

    Each part can be read without the others. Whoever wants the next asks again, from number ``first + len(rows)`` on.
    """

    first: Count
    total: Count
    tails: Annotated[tuple[Blob, ...], Meta(max_length=PART_WORKERS)]
    rows: Annotated[tuple[CardRow, ...], Meta(max_length=PART_WORKERS)]

    @property
    def next(self) -> int:
        """The number of the first worker that is not told yet."""
        return self.first + len(self.rows)


class WorkerKind(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Workers of an engine with the same groups, number of blocks and backend.

    They differ in rank, memory and what their backends exported. ``head`` and ``tail`` are the geometry of one of them,
    with rank 0 and every address 0. The groups of each fit into its memory.
    """

    head: Blob
    tail: Blob
    backend: Id


class EngineLayout(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All of an engine's geometry but the addresses: the ``ranks`` in the card's order, and of which kind each is.

    Engines of one shape have one layout: those whose documents are of another form have none.
    """

    kinds: Annotated[tuple[WorkerKind, ...], Meta(max_length=PART_WORKERS)]
    ranks: Annotated[tuple[Rank, ...], Meta(max_length=PART_WORKERS)]
    of: Annotated[tuple[Count, ...], Meta(max_length=PART_WORKERS)]


class CardOutline(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one worker needs of a peer: of all its workers what planning needs, and ``rows`` of its partners.

    Partners are the workers with which it exchanges anything. Of the others it is told neither addresses nor metadata.
    ``layout`` is an encoded `EngineLayout`. Whoever has read one of the same ``shape`` need not read it again.
    """

    shape: Id
    layout: Blob
    rows: Annotated[tuple[CardRow, ...], Meta(max_length=PART_WORKERS)]


class GetPeer(Request, tag="get_peer", frozen=True, kw_only=True):
    """A local client of engine ``local_engine`` wants peer engine ``engine_id`` behind ``endpoint``.

    ``generation`` is the one the client was told of (in kv_transfer_params), empty when unknown: a cached
    answer of another generation is then not good enough. ``keyed``: nor is one without the peer's ``digest_key``, as
    long as its kvd may have it. ``first``: the card is wanted in parts (`CardPart`), from this worker on. Answered by
    `PeerReady` or `Refused`.
    """

    local_engine: Id
    engine_id: Id
    endpoint: Endpoint = Endpoint()
    generation: Id = ""
    keyed: bool = False
    first: Count | None = None


class PeerReady(Reply, tag="peer_ready", frozen=True, kw_only=True):
    """The peer's card, found compatible.

    Also pushed (correlation id 0) to a local engine's clients ahead of need. A scheduler's comes without the workers,
    of which it needs nothing, and it alone gets the ``digest_key``. With a ``part`` or an ``outline`` the workers are
    there, and not in the card. Outlines are for workers that said that they take them.

    ``seconds`` is what the handshake took in kvd, 0 when it was answered from the cache.
    """

    local_engine: Id
    peer: EngineCard
    endpoint: Endpoint = Endpoint()
    seconds: Seconds = 0.0
    cached: bool = False
    part: CardPart | None = None
    outline: CardOutline | None = None


class PeerGone(Reply, tag="peer_gone", frozen=True, kw_only=True):
    """Pushed: this generation of the peer engine must not be used any more.

    Transfers from it end as misses.
    """

    engine_id: Id
    generation: Id
    reason: Text


class DescribeEngine(Request, tag="describe_engine", frozen=True, kw_only=True):
    """kvd to kvd: the card of an engine of yours, and tell me when it changes.

    ``keyed``: it is worth waiting a moment for the engine's scheduler, which has the key. ``first``: the card is wanted
    in parts, from this worker on, and later parts are wanted of that ``generation`` alone. Answered by
    `EngineDescribed`.
    """

    engine_id: Id
    kvd_id: Id
    kvd_generation: Id
    keyed: bool = False
    first: Count | None = None
    generation: Id = ""


class EngineDescribed(Reply, tag="engine_described", frozen=True, kw_only=True):
    """kvd to kvd: the card of a complete engine.

    With a ``part`` its workers are there, and not in the card. ``shape`` is a digest of all that the engine's
    compatibility can depend on. It is not believed: whoever is told makes its own.
    """

    card: EngineCard
    kvd_generation: Id
    shape: Id = ""
    part: CardPart | None = None


class EngineEnded(Reply, tag="engine_gone", frozen=True, kw_only=True):
    """kvd to kvd, pushed to whoever asked for the engine: that generation ended."""

    engine_id: Id
    generation: Id
    reason: Text


class Ping(Request, tag="ping", frozen=True, kw_only=True):
    """kvd to kvd: are you there? Carries the engines (id, generation) of yours that I still use.

    ``known`` are ids of all engines of yours that I know, gone ones too: of others I need not be told that they are
    ready. None from a kvd that does not say. ``told``: I take `EnginesChanged`. ``silent``: ping these, they do not
    answer me.
    """

    kvd_id: Id
    kvd_generation: Id
    using: Generations = ()
    known: Annotated[tuple[Id, ...], Meta(max_length=MOST_ENGINES)] | None = None
    told: bool = False
    silent: Silent = ()


class Pong(Reply, tag="pong", frozen=True, kw_only=True):
    """kvd to kvd: here; of the engines you use, these (id, generation) are gone; and these are ready here.

    ``draining`` are the ids of those that you know, and that are to be given nothing new (`kvd.wire.drain`).
    ``changes`` is one more than how often engines came up here or ended since this kvd was started, 0 from a kvd that
    does not say. While it stays the same `kvd.wire.query.ListEngines` has nothing new, and without ``up`` engines
    nothing at all. ``silent`` as in `Ping`.
    """

    kvd_id: Id
    kvd_generation: Id
    gone: Generations = ()
    ready: Generations = ()
    draining: Annotated[tuple[Id, ...], Meta(max_length=MOST_ENGINES)] = ()
    changes: Count = 0
    up: Count = 0
    silent: Silent = ()


class EnginesChanged(Reply, tag="engines_changed", frozen=True, kw_only=True):
    """kvd to kvd, pushed to whoever said that it takes this: an engine came up here; the fields are those of `Pong`."""

    changes: Count
    up: Count
