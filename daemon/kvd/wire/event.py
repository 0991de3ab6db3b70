"""Events: what kvd publishes on its PUB socket, one struct, topic frame = kind."""

from __future__ import annotations

from typing import get_args

import msgspec

from kvd.wire.limits import Count, Facts, Id, Seconds, Text
from kvd.wire.order import MissState

KINDS = (
    "engine.ready", "engine.gone", "engine.lost",
    "worker.registered", "worker.alive", "worker.silent", "worker.gone",
    "scheduler.registered", "scheduler.alive", "scheduler.silent", "scheduler.gone",
    "handshake.done", "handshake.failed", "handshake.refused",
    "lease.opened", "lease.extended", "lease.released", "lease.expired", "lease.aborted", "lease.owner_gone",
    "transfer.miss",
    "push.announced", "push.withdrawn", "push.failed",
    "order.force_miss", "order.refused", "order.cleared", "order.end_lease", "order.drain",
    "order.evict",
    *(f"miss.{state}" for state in get_args(MissState)),
    "peer.up", "peer.down", "peer.impostor",
    "key.trusted", "key.revoked",
)  # fmt: skip
"""All kinds of events."""


class KvdEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something happened.

    ``kind`` is dotted, one of `KINDS`; ``seq`` has no gaps, so a reader sees what it lost.
    """

    seq: Count
    time: Seconds
    kind: Id
    subject: Text
    detail: Facts = {}
