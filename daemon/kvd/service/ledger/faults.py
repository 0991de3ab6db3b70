"""What an error means for the ledger: for one job, for its connection, or for its file."""

from __future__ import annotations

import logging
import sqlite3
import time
from typing import Literal

from kvd.service.errors import LEDGER_CODE

log = logging.getLogger(__name__)

CODED = {"code": LEDGER_CODE}
"""What a line of the log about the ledger has as ``extra``."""

TOLD_SECONDS = 60.0
"""How long an error of one kind is not told again: somebody may cause it a thousand times a second."""

LedgerFault = Literal["job", "pause", "reopen", "damaged", "interrupted"]
"""Whom an error is about.

job: what was asked. pause: the database, for now; the connection is good. reopen: the connection. damaged: the file.
interrupted: nobody, it took too long.
"""

_PAUSES = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM}
_DAMAGES = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_REOPENS = {
    sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOLFS, sqlite3.SQLITE_INTERNAL,
    # All statements here are fixed texts: one that SQLite cannot compile does not fit the file, which opening it shows.
    sqlite3.SQLITE_ERROR, sqlite3.SQLITE_SCHEMA,
}  # fmt: skip


class Damaged(sqlite3.DatabaseError):
    """The file is a database, and not the ledger's: tables or columns are missing."""


def fault_of(error: BaseException) -> LedgerFault:
    """Whom an error is about."""
    if isinstance(error, Damaged):
        return "damaged"
    if isinstance(error, MemoryError):
        return "job"
    code = getattr(error, "sqlite_errorcode", None)
    if not isinstance(error, sqlite3.Error) or code is None:
        return "job"
    # The lowest byte is the kind, the others say more of it.
    primary = code & 0xFF
    if primary == sqlite3.SQLITE_INTERRUPT:
        return "interrupted"
    if primary in _DAMAGES:
        return "damaged"
    if primary in _PAUSES:
        return "pause"
    return "reopen" if primary in _REOPENS else "job"


def told(error: BaseException) -> str:
    """An error in one line: SQLite's own words, of others their kind as well."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, sqlite3.Error | OSError) and text else f"{type(error).__name__}: {text}"


class FaultLog:
    """Tells of errors that cost a job: each kind of error once in `TOLD_SECONDS`, with where it came from."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._at: dict[type[BaseException], float] = {}

    def tell(self, error: BaseException) -> None:
        """Log it, where its kind was not told lately."""
        now = time.monotonic()
        if now - self._at.get(type(error), -TOLD_SECONDS) >= TOLD_SECONDS:
            self._at[type(error)] = now
            log.error(
                "%s: %s; one job is lost, the ledger goes on",
                self._what,
                told(error),
                exc_info=error,
                extra=CODED,
            )
