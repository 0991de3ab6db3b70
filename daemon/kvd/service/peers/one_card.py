"""A generation of an engine has one card, whichever kvds say that it is theirs.

kv_transfer_params name the kvd that is asked, and a client may have written them. So a card that is fetched at a
client's word neither replaces nor precedes that of a kvd which the configuration names, or of an engine of this host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from kvd.service.errors import RequestRefused
from kvd.wire.identity import Endpoint, EngineCard


def displaced(
    endpoint: Endpoint,
    card: EngineCard,
    others: Iterable[tuple[Endpoint, EngineCard, bool]],
    trusted: Collection[Endpoint],
) -> Iterator[tuple[Endpoint, EngineCard]]:
    """The cards of the same engine that give way to one that came from ``endpoint``.

    ``others`` are the cards in use with where they came from, and whether that kvd is connected. One kvd with two
    addresses gives the same card twice, and an engine that moved a card of another generation: neither is refused, but
    for the latter while a ``trusted`` kvd still has the engine. Raises `RequestRefused` where the new card gives way.
    """
    for where, other, connected in others:
        same = other.generation == card.generation
        if where == endpoint or (same and not _differ(other, card)):
            continue
        if endpoint in trusted and where not in trusted:
            yield where, other
        elif same or (connected and where in trusted and endpoint not in trusted):
            one, another = (str(kvd) if kvd.host else "this host" for kvd in (endpoint, where))
            raise RequestRefused(
                "KVD-PEER-CONTRADICTION",
                f"the kvd at {one} and the one at {another} both say that engine"
                f" {card.engine.engine_id!r} is theirs, and their cards differ",
                hint="give each engine an engine_id of its own; name the right kvd in peer.connect",
            )


def _differ(one: EngineCard, other: EngineCard) -> bool:
    """Cards without a key may get one yet."""
    keys = {one.digest_key, other.digest_key} - {b""}
    return one.workers != other.workers or len(keys) > 1
