"""Takes over the records that can be read of a ledger that was set aside, in parts, while the new one goes on."""

from __future__ import annotations

import logging
import sqlite3
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec

from kvd.service.ledger import files, store
from kvd.service.ledger.faults import told

log = logging.getLogger(__name__)

ROWS = 250
"""Most records of one part, which holds up the writer for some 20 ms."""
READS = 200
"""Most attempts at reading in one part."""
ENGINES = 5000
"""Most descriptions of engines, which are taken over at once."""
HOPELESS = 20_000
"""So many attempts in a row that gave nothing: what is left was on pages that are gone."""
HIGHEST = 1 << 40
"""Where the number of the last record cannot be read it is taken to be below this one."""

_StoredRow = tuple[int, float, bytes, bytes | None]


class Salvage:
    """A database that was set aside, and how far its records were taken over. For the writer's thread.

    Damage is on some of its pages. So a range of numbers that cannot be read is halved, and both halves are tried,
    the widest first; what stays in the end are the records on damaged pages.
    """

    def __init__(self, aside: Path) -> None:
        self.aside = aside
        self.taken = 0
        self.unreadable = 0
        self._spans: deque[tuple[int, int]] = deque()
        self._fruitless = 0
        self._began = False
        self._why = ""
        self._columns = "blocks"
        self._database: sqlite3.Connection | None = None
        with suppress(sqlite3.Error, OSError, MemoryError):
            self._open()

    @property
    def highest(self) -> int:
        """The number of its last record, 0 where that cannot be read."""
        if self._database is None:
            return 0
        with suppress(sqlite3.Error):
            if known := store.last_seq(self._database):
                return known
        with suppress(sqlite3.Error):
            return int(self._database.execute("SELECT max(seq) FROM transfers").fetchone()[0] or 0)
        return 0

    def part(self, into: sqlite3.Connection) -> bool:
        """Take over the next records; whether there are more. Raises `sqlite3.Error` where ``into`` takes none."""
        if self._database is None:
            return False
        engines, rows = self._engines_once(), self._read()
        if rows or engines:
            self._write(into, engines, rows)
        return bool(self._spans) and self._fruitless < HOPELESS

    def _write(
        self, into: sqlite3.Connection, engines: list[tuple[object, ...]], rows: list[_StoredRow]
    ) -> None:
        with store.transaction(into):
            into.executemany(
                "INSERT OR IGNORE INTO engines (engine_id, generation, seen, engine) VALUES (?, ?, ?, ?)",
                engines,
            )
            taken = sum(self._take(into, row) for row in rows)
        self.taken += taken

    def close(self, path: Path, most: int) -> str:
        """Close it and name it for good; what became of it, for the log. For ``most`` see `files.settle`."""
        if self._database is not None:
            with suppress(sqlite3.Error):
                self._database.close()
        self._database = None
        kept = self.aside
        with suppress(OSError):  # it is read once more at the next start then, which changes nothing
            kept = files.settle(self.aside, path, most)
        why = f" ({self._why})" if self._why else ""
        lost = f"of {self.unreadable} more nothing can be read" if self.unreadable else "all that it had"
        if self._why and not self.unreadable:
            lost = "whatever else it had cannot be read"
        return f"{self.taken} records taken over from it, {lost}{why}; kept as {kept}"

    def abandon(self) -> None:
        """Close it; it is read from its beginning another time, and what is there already is taken once."""
        if self._database is not None:
            with suppress(sqlite3.Error):
                self._database.close()
        self._database = None

    def _open(self) -> None:
        if files.odd(self.aside):
            self._why = "it is no file"
            return
        database = sqlite3.connect(self.aside, check_same_thread=False, timeout=0.0, isolation_level=None)
        try:
            database.execute("PRAGMA query_only=ON")
            names = {row[1] for row in database.execute("PRAGMA table_info(transfers)")}
        except sqlite3.Error as error:
            self._why = told(error)
            database.close()
            return
        self._columns = "blocks" if "blocks" in names else "NULL"
        self._database = database
        self._spans.append((1, self.highest or HIGHEST))

    def _engines_once(self) -> list[tuple[object, ...]]:
        found: list[tuple[object, ...]] = []
        if self._database is None or self._began:
            return found
        self._began = True
        with suppress(sqlite3.Error):
            asked = "SELECT engine_id, generation, seen, engine FROM engines LIMIT ?"
            found.extend(self._database.execute(asked, (ENGINES,)))
        return found

    def _read(self) -> list[_StoredRow]:
        rows: list[_StoredRow] = []
        for _ in range(READS):
            if len(rows) >= ROWS or not self._spans:
                break
            low, high = self._spans.popleft()
            before = len(rows)
            if self._scan(low, high, ROWS - before, rows):
                if len(rows) == ROWS:  # there may be more of this span
                    self._spans.appendleft((rows[-1][0] + 1, high))
                self._fruitless = 0
                continue
            if len(rows) > before:
                low, self._fruitless = rows[-1][0] + 1, 0
            else:
                self._fruitless += 1
            self._halve(low, high)
        if self._fruitless >= HOPELESS:
            self.unreadable += sum(high - low + 1 for low, high in self._spans)
        return rows

    def _scan(self, low: int, high: int, most: int, rows: list[_StoredRow]) -> bool:
        """Read a span in ascending order; whether it went to its end, or to ``most``."""
        if self._database is None:
            return False
        if low > high:
            return True
        try:
            rows.extend(
                self._database.execute(
                    f"SELECT seq, recorded, record, {self._columns} FROM transfers"  # noqa: S608 (fixed texts)
                    " WHERE seq BETWEEN ? AND ? ORDER BY seq LIMIT ?",
                    (low, high, most),
                )
            )
        except sqlite3.Error as error:
            self._why = told(error)
            if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_NOTADB:
                self._fruitless = HOPELESS
            return False
        return True

    def _halve(self, low: int, high: int) -> None:
        if low >= high:
            self.unreadable += low == high
            return
        middle = (low + high) // 2
        self._spans += [(low, middle), (middle + 1, high)]

    def _take(self, into: sqlite3.Connection, row: _StoredRow) -> bool:
        seq, recorded, blob, blocks = row
        try:
            record = store.decode_record(blob)
            if blocks is not None:
                local, remote = store.decode_blocks(blocks)
                record = msgspec.structs.replace(record, local_blocks=local, remote_blocks=remote)
            recorded = float(recorded)
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
            self.unreadable += 1
            self._why = told(error)
            return False
        return store.insert_again(into, seq, recorded, record)
