"""The shape of an engine: a digest of all that decides what it fits, not its id, and no address.

Local engines have theirs from the geometries that they registered with, peers from their cards, in kvd
(`kvd.service.peers.card_shape`) or in the process that compares. All three make it here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from kvd.wire.identity import EngineFacts


def engine_shape(engine: EngineFacts, workers: Iterable[tuple[str, str]]) -> str:
    """The shape of an engine; ``workers`` are the backend and the geometry's shape of each, in the card's order."""
    facts = msgspec.structs.replace(engine, engine_id="", facts=dict(sorted(engine.facts.items())))
    return hashlib.blake2b(msgspec.msgpack.encode((facts, tuple(workers))), digest_size=16).hexdigest()
