"""The ledger: the durable record of transfers, in SQLite, written in batches by one thread."""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvd.service.config import LedgerSettings
from kvd.service.errors import LedgerError
from kvd.wire.transfer import LedgerRow, ListTransfers, TransferRecord, Transfers

log = logging.getLogger(__name__)

BATCH = 512
"""Most jobs of one commit."""
PRUNE_SECONDS = 10.0
MAX_LIMIT = 10_000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS transfers (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    transfer_id TEXT NOT NULL,
    request_id TEXT NOT NULL,
    remote_request_id TEXT NOT NULL,
    local_engine TEXT NOT NULL,
    local_rank TEXT NOT NULL,
    remote_engine TEXT NOT NULL,
    state TEXT NOT NULL,
    recorded REAL NOT NULL,
    record BLOB NOT NULL,
    UNIQUE (transfer_id, local_engine, local_rank)
);
CREATE INDEX IF NOT EXISTS by_request ON transfers (request_id);
CREATE INDEX IF NOT EXISTS by_remote_request ON transfers (remote_request_id);
CREATE INDEX IF NOT EXISTS by_recorded ON transfers (recorded);
"""
_INSERT = (
    "INSERT OR IGNORE INTO transfers (transfer_id, request_id, remote_request_id, local_engine, local_rank,"
    " remote_engine, state, recorded, record) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(TransferRecord).decode


@dataclass(slots=True)
class _Job:
    work: Callable[[sqlite3.Connection], Any]
    done: asyncio.Future[Any]
    writes: bool


class Ledger:
    """The ledger. Methods are for the event loop that made it; the thread opens the database and owns it alone.

    So a slow disk delays the records and nothing else. ``opened`` is done when the database is open, or holds the
    `LedgerError` that says why it cannot be.
    """

    def __init__(self, path: Path, settings: LedgerSettings) -> None:
        self.path = path
        self.settings = settings
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self._database: sqlite3.Connection
        self._pruned = 0.0
        self._thread = threading.Thread(target=self._run, name="kvd-ledger", daemon=True)
        self._thread.start()

    async def append(self, records: tuple[TransferRecord, ...]) -> tuple[TransferRecord, ...]:
        """Write records; returns, once they are on disk, those that were not there before. Raises `LedgerError`."""
        fresh: tuple[TransferRecord, ...] = await self._ask(
            lambda database: _insert(database, records), writes=True
        )
        return fresh

    async def select(self, query: ListTransfers) -> Transfers:
        """The newest matching rows, newest first, 10000 at most. Raises `LedgerError`."""
        found: Transfers = await self._ask(lambda database: _select(database, query), writes=False)
        return found

    def close(self, timeout: float) -> None:
        """Commit what waits and close the database; at most ``timeout`` seconds."""
        self._jobs.put(None)
        self._thread.join(timeout)

    async def _ask(self, work: Callable[[sqlite3.Connection], Any], *, writes: bool) -> Any:
        job = _Job(work, self._loop.create_future(), writes)
        self._jobs.put(job)
        return await job.done

    def _run(self) -> None:
        try:
            self._database = open_database(self.path)
        except LedgerError as error:
            self._loop.call_soon_threadsafe(_resolve, self.opened, error)
            return
        self._loop.call_soon_threadsafe(_resolve, self.opened, None)
        going = True
        while going:
            jobs = [self._jobs.get()]
            while len(jobs) < BATCH and not self._jobs.empty():
                jobs.append(self._jobs.get())
            going = None not in jobs
            self._commit([job for job in jobs if job is not None])
            if time.monotonic() - self._pruned > PRUNE_SECONDS:
                self._pruned = time.monotonic()
                self._prune()
        self._database.close()

    def _commit(self, jobs: list[_Job]) -> None:
        results: list[tuple[_Job, Any]] = []
        try:
            with self._database:
                results += [(job, job.work(self._database)) for job in jobs if job.writes]
        except sqlite3.Error as error:
            failure = LedgerError(f"the ledger {self.path} cannot be written: {error}")
            results = [(job, failure) for job in jobs if job.writes]
        for job in jobs:
            if not job.writes:
                try:
                    results.append((job, job.work(self._database)))
                except (sqlite3.Error, msgspec.MsgspecError) as error:
                    results.append((job, LedgerError(f"the ledger {self.path} cannot be read: {error}")))
        for job, result in results:
            self._loop.call_soon_threadsafe(_resolve, job.done, result)

    def _prune(self) -> None:
        try:
            with self._database:
                oldest = time.time() - self.settings.max_age_seconds
                self._database.execute("DELETE FROM transfers WHERE recorded < ?", (oldest,))
                self._database.execute(
                    "DELETE FROM transfers WHERE seq <= (SELECT seq FROM transfers ORDER BY seq DESC LIMIT 1 OFFSET ?)",
                    (self.settings.max_rows,),
                )
        except sqlite3.Error as error:
            log.warning("old records of the ledger %s could not be deleted: %s", self.path, error)


def open_database(path: Path) -> sqlite3.Connection:
    """The database, made where there is none. A file that is no database is set aside under another name, and logged.

    Raises `LedgerError` where the place cannot be used.
    """
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        try:
            return _prepare(path)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            aside = path.with_name(f"{path.name}.broken-{int(time.time())}")
            log.warning(
                "the ledger %s is damaged (%s): set aside as %s, a new one begins", path, error, aside
            )
            path.rename(aside)
            return _prepare(path)
    except (OSError, sqlite3.Error) as error:
        raise LedgerError(f"the ledger {path} cannot be opened: {error}") from None


def _prepare(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, check_same_thread=False, timeout=5.0)
    try:
        database.execute("PRAGMA journal_mode=WAL")
        # A record that a worker was told is safe must survive a power cut, so the log is synced at each commit.
        database.execute("PRAGMA synchronous=FULL")
        database.executescript(_SCHEMA)
        database.execute("SELECT count(*) FROM transfers").fetchone()
    except sqlite3.Error:
        database.close()
        raise
    return database


def _insert(database: sqlite3.Connection, records: tuple[TransferRecord, ...]) -> tuple[TransferRecord, ...]:
    now = time.time()
    return tuple(
        r
        for r in records
        if database.execute(
            _INSERT,
            (r.transfer_id, r.request_id, r.remote_request_id, r.local_engine, r.local_rank, r.remote_engine, r.state,
             now, _encode(r)),
        ).rowcount
    )  # fmt: skip


def _select(database: sqlite3.Connection, query: ListTransfers) -> Transfers:
    where, values = ["seq > ?"], [query.after]
    filters: list[str] = []
    if query.request_id:
        where.append("(request_id = ? OR remote_request_id = ?)")
        filters += [query.request_id] * 2
    if query.engine_id:
        where.append("(local_engine = ? OR remote_engine = ?)")
        filters += [query.engine_id] * 2
    if query.state:
        where.append("state = ?")
        filters.append(query.state)
    rows = database.execute(
        f"SELECT seq, record FROM transfers WHERE {' AND '.join(where)} ORDER BY seq DESC LIMIT ?",  # noqa: S608 (fixed texts only)
        (*values, *filters, min(max(query.limit, 0), MAX_LIMIT)),
    ).fetchall()
    total = database.execute("SELECT count(*) FROM transfers").fetchone()[0]
    return Transfers(rows=tuple(LedgerRow(seq, _decode(record)) for seq, record in rows), total=total)


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    if future.done():
        return
    if isinstance(result, LedgerError):
        future.set_exception(result)
    else:
        future.set_result(result)
