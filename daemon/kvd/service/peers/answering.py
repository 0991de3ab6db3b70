"""What a client of a local engine is told of a peer: a scheduler no workers, a worker its partners, or all of them."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from kvd.service.engines.local_engine import Client, LocalEngine
from kvd.service.errors import RequestRefused
from kvd.service.peers.exchanges import Exchanges
from kvd.service.peers.peer_engine import PeerEngine
from kvd.wire.handshake import CardOutline, PeerReady
from kvd.wire.identity import Endpoint

WHOLE_BYTES = 60 << 20
"""A client takes messages of 64 MiB: a larger card is told in parts only, or in outline."""


class Addressee(NamedTuple):
    """Who is told: a client of an engine, None where it is not known. ``first`` is the part that it wants, if any."""

    engine: LocalEngine
    client: Client | None
    first: int | None


def answer(
    peer: PeerEngine, endpoint: Endpoint, to: Addressee, seconds: float, exchanges: Exchanges
) -> PeerReady:
    """What it is told. Raises `RequestRefused`."""
    engine, client, first = to
    brief = client is not None and client is engine.scheduler
    outline = None if brief or client is None or first else _outline(peer, engine, client, exchanges)
    if first is None and not brief and outline is None and peer.size > WHOLE_BYTES:
        raise RequestRefused(
            "KVD-TOO-LARGE",
            f"the card of engine {peer.card.engine.engine_id!r} has {peer.size} bytes; a message has at most"
            f" {WHOLE_BYTES}",
            hint="ask for it in parts: give the engine a connector of this kvd's version",
        )
    return peer.answer(engine.facts.engine_id, endpoint, seconds, brief=brief, first=first, outline=outline)


def _outline(
    peer: PeerEngine, engine: LocalEngine, client: Client, exchanges: Exchanges
) -> CardOutline | None:
    """The peer's card for a worker that takes outlines; None where it is to be told all of it."""
    if not (client.outlines and client.rank and engine.shape and peer.shape):
        return None
    position = bisect_left(engine.ranks, client.rank)
    if (
        engine.ranks[position : position + 1] != [client.rank]
        or engine.workers.get(client.rank) is not client
    ):
        return None
    return exchanges.outline((engine.shape, peer.shape), position, peer.card)
