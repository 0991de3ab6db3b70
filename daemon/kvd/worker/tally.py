"""What became of transfers since it was last asked, for the metrics that an engine serves itself."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from kvd.wire.miss import MissCode
from kvd.wire.transfer import TransferRecord

MOST_KEPT = 4096
"""Transfers that are kept for an engine that does not ask; further ones are left out."""
NOBODYS_FAILURE: frozenset[MissCode] = frozenset({"REQUEST_OVER", "SHUTDOWN"})
"""Misses that say nothing of the transfer: nobody waited for it."""


@dataclass(frozen=True, slots=True)
class MovedPart:
    """A worker's part of a transfer that came whole.

    ``seconds`` are from its first post to its last byte, of a push from the first layer to the last. ``post_seconds``
    and ``descriptors`` are None where another process posted: the prefiller of a push.
    """

    seconds: float
    post_seconds: float | None
    nbytes: int
    descriptors: int | None


@dataclass(slots=True)
class Counted:
    """Transfers that came whole, how many missed, and prefills that nobody fetched while they were kept."""

    moved: list[MovedPart] = field(default_factory=list)
    failed: int = 0
    expired: int = 0


class TransferTally:
    """Any thread adds to it, a step takes what there is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted = Counted()
        self.any = False
        """Whether there may be something to take; each step looks."""

    def note(self, record: TransferRecord) -> None:
        """A transfer ended."""
        with self._lock:
            self.any = True
            if record.state == "miss":
                self._counted.failed += record.code not in NOBODYS_FAILURE
            elif len(self._counted.moved) < MOST_KEPT:
                self._counted.moved.append(_moved(record))

    def expire(self, count: int = 1) -> None:
        """Leases ended by their time."""
        with self._lock:
            self.any = True
            self._counted.expired += count

    def take(self) -> Counted | None:
        """What there is since the last time; None where that is nothing."""
        with self._lock:
            counted, self._counted, self.any = self._counted, Counted(), False
        return counted if counted.moved or counted.failed or counted.expired else None


def _moved(record: TransferRecord) -> MovedPart:
    post = record.stages.get("post")
    return MovedPart(
        record.stages.get("wire", 0.0) + (post or 0.0),
        post,
        record.bytes,
        record.coalesced_descriptors or None,
    )
