"""Handshake: what one engine must know of another, fetched once for each (peer engine, generation)."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from kvd.wire.identity import Endpoint, EngineCard
from kvd.wire.limits import MOST_ENGINES, Id, Seconds, Text
from kvd.wire.reply import Reply, Request

Generations: TypeAlias = Annotated[tuple[tuple[Id, Id], ...], Meta(max_length=MOST_ENGINES)]
"""Engines: id and generation."""


class GetPeer(Request, tag="get_peer", frozen=True, kw_only=True):
    """A local client of engine ``local_engine`` wants peer engine ``engine_id`` behind ``endpoint``.

    ``generation`` is the one the client was told of (in kv_transfer_params), empty when unknown: a cached
    answer of another generation is then not good enough. ``keyed``: nor is one without the peer's ``digest_key``, as
    long as its kvd may have it. Answered by `PeerReady` or `Refused`.
    """

    local_engine: Id
    engine_id: Id
    endpoint: Endpoint = Endpoint()
    generation: Id = ""
    keyed: bool = False


class PeerReady(Reply, tag="peer_ready", frozen=True, kw_only=True):
    """The peer's card, found compatible.

    Also pushed (correlation id 0) to a local engine's clients ahead of need. A scheduler's comes without the workers,
    of which it needs nothing, and it alone gets the ``digest_key``.

    ``seconds`` is what the handshake took in kvd, 0 when it was answered from the cache.
    """

    local_engine: Id
    peer: EngineCard
    endpoint: Endpoint = Endpoint()
    seconds: Seconds = 0.0
    cached: bool = False


class PeerGone(Reply, tag="peer_gone", frozen=True, kw_only=True):
    """Pushed: this generation of the peer engine must not be used any more.

    Transfers from it end as misses.
    """

    engine_id: Id
    generation: Id
    reason: Text


class DescribeEngine(Request, tag="describe_engine", frozen=True, kw_only=True):
    """kvd to kvd: the card of an engine of yours, and tell me when it changes.

    ``keyed``: it is worth waiting a moment for the engine's scheduler, which has the key. Answered by
    `EngineDescribed`.
    """

    engine_id: Id
    kvd_id: Id
    kvd_generation: Id
    keyed: bool = False


class EngineDescribed(Reply, tag="engine_described", frozen=True, kw_only=True):
    """kvd to kvd: the card of a complete engine.

    ``shape`` is a digest of all that the engine's compatibility can depend on: equal ones are compared once. Empty from
    a kvd that does not make it.
    """

    card: EngineCard
    kvd_generation: Id
    shape: Id = ""


class EngineEnded(Reply, tag="engine_gone", frozen=True, kw_only=True):
    """kvd to kvd, pushed to whoever asked for the engine: that generation ended."""

    engine_id: Id
    generation: Id
    reason: Text


class Ping(Request, tag="ping", frozen=True, kw_only=True):
    """kvd to kvd: are you there? Carries the engines (id, generation) of yours that I still use."""

    kvd_id: Id
    kvd_generation: Id
    using: Generations = ()


class Pong(Reply, tag="pong", frozen=True, kw_only=True):
    """kvd to kvd: here; of the engines you use, these (id, generation) are gone; and these are ready here."""

    kvd_id: Id
    kvd_generation: Id
    gone: Generations = ()
    ready: Generations = ()
