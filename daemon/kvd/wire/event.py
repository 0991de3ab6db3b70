"""Events: what kvd publishes on its PUB socket, one struct, topic frame = kind."""

from __future__ import annotations

import msgspec

from kvd.wire.limits import Count, Facts, Id, Seconds, Text


class KvdEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something happened.

    ``kind`` is dotted (``engine.ready``, ``worker.gone``, ``lease.expired``, ``peer.down``, ``handshake.done``,
    ``handshake.refused``, ``transfer.miss``, ``push.failed`` ...); ``seq`` has no gaps, so a reader sees what it
    lost.
    """

    seq: Count
    time: Seconds
    kind: Id
    subject: Text
    detail: Facts = {}
