"""Whether the ledger can be written now, and why not."""

from __future__ import annotations

import msgspec


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger at one moment. ``reason`` is empty while it is ``open``; ``since`` is time.monotonic().

    ``rows`` are its records; ``generation`` counts the files that were opened, 0 while readers may open none. ``aside``
    are the names of databases beside it that were damaged and set aside, the newest last.
    """

    open: bool = False
    reason: str = "it is being opened"
    since: float = 0.0
    rows: int = 0
    generation: int = 0
    aside: tuple[str, ...] = ()
