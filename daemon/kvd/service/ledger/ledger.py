"""The ledger: the durable record of transfers, in SQLite. One thread writes it in batches, another one reads it."""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvd.service.config import LedgerSettings
from kvd.service.errors import LedgerError
from kvd.service.ledger import store
from kvd.service.ledger.query import kept_engine, select
from kvd.wire.identity import EngineCard
from kvd.wire.transfer import KeptEngine, ListTransfers, TransferList, TransferRecord

log = logging.getLogger(__name__)

BATCH = 512
"""Most jobs of one commit."""
PRUNE_SECONDS = 10.0
PRUNE_MORE_SECONDS = 0.5
"""The same while there is more to delete than one pruning does."""


@dataclass(slots=True)
class _Job:
    work: Callable[[sqlite3.Connection], Any]
    done: asyncio.Future[Any]


Found = TypeVar("Found")
Jobs = queue.Queue[_Job | None]


class Ledger:
    """The ledger. Methods are for the event loop that made it; its two threads own the database.

    So a slow disk delays the records and nothing else, and a long question delays no record. ``opened`` is done when
    the database is open, or holds the `LedgerError` that says why it cannot be. ``known`` are the engines of which a
    description is kept.
    """

    def __init__(self, path: Path, settings: LedgerSettings) -> None:
        self.path = path
        self.settings = settings
        self.known: set[store.EngineKey] = set()
        self._loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self._writes: Jobs = queue.Queue()
        self._questions: Jobs = queue.Queue()
        self._total = 0
        self._prune_at = 0.0
        self._seen: dict[store.EngineKey, float] = {}
        self._ready = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=f"kvd-ledger-{name}", daemon=True)
            for name, run in (("writer", self._write), ("reader", self._read))
        ]
        for thread in self._threads:
            thread.start()

    async def append(
        self, records: tuple[TransferRecord, ...], engines: Sequence[EngineCard] = ()
    ) -> tuple[TransferRecord, ...]:
        """Write records, and engines that they name; returns, once all is on disk, the records that are new there.

        Raises `LedgerError`.
        """

        def work(database: sqlite3.Connection) -> tuple[TransferRecord, ...]:
            store.keep_engines(database, engines)
            self._refresh(database, records)
            return store.insert(database, records)

        fresh = await self._ask(self._writes, work)
        self.known.update((card.engine.engine_id, card.generation) for card in engines)
        return fresh

    async def select(self, query: ListTransfers) -> TransferList:
        """The matching rows, 10000 and 16 MiB at most. Raises `LedgerError`."""
        return await self._ask(self._questions, lambda database: select(database, query, self._total))

    async def engine(self, engine_id: str, generation: str) -> KeptEngine | None:
        """What is kept of an engine that records name. Raises `LedgerError`."""
        return await self._ask(self._questions, lambda database: kept_engine(database, engine_id, generation))

    def close(self, timeout: float) -> None:
        """Commit what waits and close the database; at most ``timeout`` seconds."""
        until = time.monotonic() + timeout
        self._writes.put(None)
        self._questions.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    async def _ask(self, jobs: Jobs, work: Callable[[sqlite3.Connection], Found]) -> Found:
        done: asyncio.Future[Found] = self._loop.create_future()
        jobs.put(_Job(work, done))
        return await done

    # --- on the writer's thread ---

    def _write(self) -> None:
        try:
            database = store.open_database(self.path)
            self._total = store.count(database)
            self.known |= store.known_engines(database)
        except LedgerError as error:
            self._questions.put(None)
            self._ready.set()
            self._answer([(self.opened, error)])
            return
        self._ready.set()
        self._answer([(self.opened, None)])
        while (jobs := _taken(self._writes)) is not None:
            self._commit(database, jobs)
            if time.monotonic() >= self._prune_at:
                self._prune(database)
        database.close()

    def _commit(self, database: sqlite3.Connection, jobs: list[_Job]) -> None:
        try:
            with database:
                results = [(job.done, job.work(database)) for job in jobs]
        except (sqlite3.Error, msgspec.MsgspecError, ValueError, OverflowError) as error:
            failure = LedgerError(f"the ledger {self.path} cannot be written: {error}")
            self._answer([(job.done, failure) for job in jobs])
            return
        self._total += sum(len(fresh) for _, fresh in results)
        self._answer(results)

    def _prune(self, database: sqlite3.Connection) -> None:
        self._prune_at = time.monotonic() + PRUNE_SECONDS
        try:
            with database:
                gone, more = store.prune(database, self.settings, self._total)
            self._total -= gone
            if gone:
                self.known = store.known_engines(database)
            if more:
                self._prune_at = time.monotonic() + PRUNE_MORE_SECONDS
        except sqlite3.Error as error:
            log.warning("old records of the ledger %s could not be deleted: %s", self.path, error)

    def _refresh(self, database: sqlite3.Connection, records: tuple[TransferRecord, ...]) -> None:
        now = time.monotonic()
        stale = [
            key
            for key in store.named_engines(records)
            if now - self._seen.get(key, 0.0) > store.REFRESH_SECONDS
        ]
        if stale:
            self._seen = {key: at for key, at in self._seen.items() if now - at <= store.REFRESH_SECONDS}
            self._seen |= dict.fromkeys(stale, now)
            store.refresh_engines(database, stale)

    # --- on the reader's thread ---

    def _read(self) -> None:
        self._ready.wait()
        if (job := self._questions.get()) is None:
            return
        database = store.open_for_reading(self.path)
        while job is not None:
            try:
                result = job.work(database)
            except (sqlite3.Error, msgspec.MsgspecError) as error:
                result = LedgerError(f"the ledger {self.path} cannot be read: {error}")
            self._answer([(job.done, result)])
            job = self._questions.get()
        database.close()

    def _answer(self, results: Sequence[tuple[asyncio.Future[Any], object]]) -> None:
        self._loop.call_soon_threadsafe(_resolve, results)


def _taken(jobs: Jobs) -> list[_Job] | None:
    """All jobs that wait, `BATCH` at most; none where there were none for `PRUNE_SECONDS`; None at the end."""
    taken: list[_Job] = []
    try:
        job = jobs.get(timeout=PRUNE_SECONDS)
        while job is not None:
            taken.append(job)
            if len(taken) == BATCH:
                return taken
            job = jobs.get_nowait()
    except queue.Empty:
        return taken
    if taken:
        jobs.put(None)
    return taken or None


def _resolve(results: Sequence[tuple[asyncio.Future[Any], object]]) -> None:
    for future, result in results:
        if future.done():
            continue
        if isinstance(result, LedgerError):
            future.set_exception(result)
        else:
            future.set_result(result)
