"""Figures of recorded transfers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvd.wire.transfer import LedgerRow, TransferRecord

ORDERS: dict[str, Callable[[LedgerRow], tuple[float, int]]] = {
    "newest": lambda row: (0.0, -row.seq),
    "slowest": lambda row: (-took(row.record), -row.seq),
    "largest": lambda row: (-row.record.bytes, -row.seq),
}
"""In which rows come: by name the key to sort them by."""


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed (nearest rank); 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def before(record: TransferRecord) -> float:
    """Seconds from the scheduler's claim, or its wait for the handshake before that, to ``started``."""
    ahead = record.moments and "handshake" not in record.moments
    return record.stages.get("queued", 0.0) + (record.stages.get("handshake", 0.0) if ahead else 0.0)


def after(record: TransferRecord) -> float:
    """Seconds from ``started`` to the last byte, or until the miss was known; between stages time may pass as well."""
    stages = sum(record.stages.values()) - before(record)
    return max(0.0, stages, record.moments.get("last", 0.0) if record.state == "done" else 0.0)


def took(record: TransferRecord) -> float:
    """Seconds that a record's transfer took, from the claim to its end."""
    return before(record) + after(record)


def moving(record: TransferRecord) -> float:
    """Seconds in which bytes moved: the stages post and wire. A push runs beside the computing and counts none."""
    return 0.0 if record.mode == "push" else posted(record)


def posted(record: TransferRecord) -> float:
    """Seconds of the stages post and wire, whoever moved the bytes."""
    return record.stages.get("post", 0.0) + record.stages.get("wire", 0.0)
