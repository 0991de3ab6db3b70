"""Figures of recorded transfers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvd.wire.transfer import LedgerRow, TransferRecord

ORDERS: dict[str, Callable[[LedgerRow], tuple[float, int]]] = {
    "newest": lambda row: (0.0, -row.seq),
    "slowest": lambda row: (-sum(row.record.stages.values()), -row.seq),
    "largest": lambda row: (-row.record.bytes, -row.seq),
}
"""In which rows come: by name the key to sort them by."""


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed (nearest rank); 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def moving(record: TransferRecord) -> float:
    """Seconds in which bytes moved: the stages post and wire. A push runs beside the computing and counts none."""
    return 0.0 if record.mode == "push" else posted(record)


def posted(record: TransferRecord) -> float:
    """Seconds of the stages post and wire, whoever moved the bytes."""
    return record.stages.get("post", 0.0) + record.stages.get("wire", 0.0)
