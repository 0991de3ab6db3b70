"""How many leases may be open, for each user of their engines and in all: by number, and by what their names take."""

from __future__ import annotations

from collections.abc import Collection

from kvd.service.fairness.tally import Tally, beyond
from kvd.wire.card_parts import text_bytes

MAX_OPEN_OF_UID = 65_536
"""Most open leases of one user's engines: 64 of them that each keep 1,000 prompts for decoders."""
MAX_OPEN = 98_304
"""Most of all users' engines, some 100 MB; one user's leave half as many for the others."""
MOST_BYTES_OF_UID = 16 << 20
"""Most bytes that their request ids take in memory: 256 for each of one user's, where real ones take some 100."""
MOST_BYTES = 24 << 20
"""The same of all users."""


class LeaseRoom:
    """Open leases by the user of the engine, and the bytes of their request ids."""

    def __init__(self) -> None:
        self._open: Tally[int] = Tally()
        self._bytes: Tally[int] = Tally()

    def full(self, uid: int, more: Collection[str]) -> str:
        """Why leases of these request ids cannot be opened too; empty where they can."""
        return beyond(self._open, "leases", uid, len(more), (MAX_OPEN_OF_UID, MAX_OPEN)) or beyond(
            self._bytes, "bytes of request ids", uid, text_bytes(more), (MOST_BYTES_OF_UID, MOST_BYTES)
        )

    def take(self, uid: int, request_id: str) -> None:
        """One is open."""
        self._open.add(uid)
        self._bytes.add(uid, text_bytes((request_id,)))

    def give_back(self, uid: int, request_id: str) -> None:
        """One is no more."""
        self._open.add(uid, -1)
        self._bytes.add(uid, -text_bytes((request_id,)))
