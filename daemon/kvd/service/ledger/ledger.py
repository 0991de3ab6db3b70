"""The ledger: the durable record of transfers, in SQLite. One thread writes it in batches, two others read it."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from kvd.service.config import LedgerSettings
from kvd.service.errors import LedgerError, StartError
from kvd.service.ledger import store
from kvd.service.ledger.faults import CODED, told
from kvd.service.ledger.jobs import NOBODY, JobQueue, LedgerClient, LedgerJob
from kvd.service.ledger.query import Own, kept_engine, select
from kvd.service.ledger.reader import LedgerReader
from kvd.service.ledger.state import LedgerState
from kvd.service.ledger.steady import SteadyClock
from kvd.service.ledger.writer import LedgerWriter
from kvd.wire.identity import EngineCard
from kvd.wire.transfer import KeptEngine, ListTransfers, TransferList, TransferRecord

log = logging.getLogger(__name__)

REPORTS = (1024, 3072)
"""Reports that may wait, of a client and of a user. A worker sends one for each load, and keeps what is refused."""
QUESTIONS = (32, 256)
"""Questions that may wait, the same."""
LONG_QUESTIONS = (2, 8)
"""Those of them that take longer than `SHORT_SECONDS`."""
SHORT_SECONDS = 0.25
LONG_SECONDS = 10.0
"""What a question may take of the ledger's time: a look at each of a million records takes 1 to 3 s on a disk."""

BEGIN_SECONDS = 5.0
"""How long kvd's start waits for the disk, to hear whether another kvd has it."""
REFUSED_SECONDS = 0.25
"""Pause after it heard that: the start fails, and nothing more is to be told."""
WATCH_SECONDS = 2.0
"""How often its threads are asked whether they live."""
SILENT_SECONDS = 10.0
"""After so long without an answer the disk hangs: records are refused, and workers keep them."""

T = TypeVar("T")


class Ledger:
    """The ledger. Methods are for the event loop that made it; its threads own the database.

    So a slow disk delays the records and nothing else, also at the start, and a long question delays no record and no
    short question. Where a disk hangs the ledger is away until it answers (`watch`).
    A disk that is full, files that are damaged or gone, make it be away for a time (``state``): records are refused
    as ``KVD-LEDGER`` then and workers keep them. What was acknowledged is on disk under its name.

    ``opened`` is done when the first attempt at opening was made. ``ended`` holds an error once a thread has ended
    that should not have: no question is answered from then on, and kvd is to end as well.
    """

    def __init__(
        self,
        path: Path,
        settings: LedgerSettings,
        runtime: Path | None = None,
        clock: SteadyClock | None = None,
    ) -> None:
        """Open the ledger at ``path`` for the kvd of that runtime directory. Whatever is wrong, it is tried again."""
        self.path = path.absolute()
        self._loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._locked: asyncio.Future[StartError | None] = self._loop.create_future()
        self._silent_since = 0.0  # time.monotonic()
        self._closing = False
        reports = JobQueue("reports", *REPORTS)
        questions, long = JobQueue("questions", *QUESTIONS), JobQueue("long questions", *LONG_QUESTIONS)
        serves = str(runtime) if runtime else ""
        self._writer = LedgerWriter(
            self.path, settings, serves, reports, self._answer, clock or SteadyClock()
        )
        self._writer.opened = self._first_attempt
        self._reader = LedgerReader(self.path, questions, SHORT_SECONDS, long, self._answer)
        self._long_reader = LedgerReader(self.path, long, LONG_SECONDS, None, self._answer)
        self._writer.readers = (self._reader, self._long_reader)
        for reader in self._writer.readers:
            reader.state = lambda: self._writer.state
            reader.suspect = self._writer.suspect
        self._parts: dict[str, LedgerWriter | LedgerReader] = {
            "writer": self._writer, "reader": self._reader, "long-reader": self._long_reader,
        }  # fmt: skip
        self._threads = [
            threading.Thread(target=self._run, args=(part,), name=f"kvd-ledger-{name}", daemon=True)
            for name, part in self._parts.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def settings(self) -> LedgerSettings:
        """Its bounds; a reload sets new ones."""
        return self._writer.settings

    @settings.setter
    def settings(self, settings: LedgerSettings) -> None:
        self._writer.settings = settings

    @property
    def known(self) -> set[store.EngineKey]:
        """The engines of which a description is kept."""
        return self._writer.known

    @property
    def state(self) -> LedgerState:
        """Whether it can be written now, and why not."""
        state = self._writer.state
        if not self._silent_since:
            return state
        reason = f"its disk has not answered for {time.monotonic() - self._silent_since:.0f} s"
        return replace(state, open=False, reason=reason, since=self._silent_since)

    async def begun(self) -> None:
        """Return once its directory is held for this kvd, at the latest after `BEGIN_SECONDS`.

        Raises `StartError` where another kvd has it.
        """
        await asyncio.wait([self._locked], timeout=BEGIN_SECONDS)
        if not self._locked.done():
            log.error(
                "the ledger %s: its disk has not answered for %g s; kvd serves without",
                self.path,
                BEGIN_SECONDS,
                extra=CODED,
            )
        elif refused := self._locked.result():
            raise refused

    async def watch(self) -> None:
        """Tell, until cancelled, when its threads stop answering and when they do again. Raises where one has ended."""
        while not self.ended.done():
            asked = time.monotonic()
            answer = self._loop.create_task(self._answers())
            await asyncio.wait(
                [answer, self.ended], timeout=SILENT_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if not answer.done() and not self.ended.done():
                self._silent_since = asked
                log.error(
                    "the ledger %s is away: %s; workers keep their records, kvd serves on",
                    self.path,
                    self.state.reason,
                    extra=CODED,
                )
                await asyncio.wait([answer, self.ended], return_when=asyncio.FIRST_COMPLETED)
                self._silent_since = 0.0
                log.warning("the ledger %s answers again, after %.0f s", self.path, time.monotonic() - asked)
            await asyncio.wait([self.ended], timeout=WATCH_SECONDS)
        await self.ended

    async def append(
        self,
        records: tuple[TransferRecord, ...],
        engines: Sequence[EngineCard] = (),
        client: LedgerClient = NOBODY,
    ) -> tuple[TransferRecord, ...]:
        """Write records, and engines that they name; returns, once all is on disk, the records that are new there.

        Raises `LedgerError`, and `RequestRefused` where too much of the client's waits already.
        """

        def work(database: sqlite3.Connection) -> tuple[TransferRecord, ...]:
            return self._writer.write(database, records, engines)

        size = sum(map(_record_size, records)) + sum(
            len(w.geometry) for card in engines for w in card.workers
        )
        fresh = await self._ask(self._writer.jobs, work, client, size)
        self._writer.known.update((card.engine.engine_id, card.generation) for card in engines)
        return fresh

    async def select(
        self, query: ListTransfers, client: LedgerClient = NOBODY, own: Own | None = None
    ) -> TransferList:
        """The matching rows, as many as one answer may hold. Raises `LedgerError` and `RequestRefused`."""
        total = self.state.rows
        return await self._ask(
            self._reader.jobs, lambda database: select(database, query, total, own), client
        )

    async def engine(
        self, engine_id: str, generation: str, client: LedgerClient = NOBODY
    ) -> KeptEngine | None:
        """What is kept of an engine that records name. Raises `LedgerError` and `RequestRefused`."""
        return await self._ask(
            self._reader.jobs, lambda database: kept_engine(database, engine_id, generation), client
        )

    async def _answers(self) -> None:
        """Return when the writer and a reader have answered."""
        asked = []
        for part in (self._writer, self._reader):
            job = LedgerJob(
                lambda database: database.execute("SELECT 1").fetchall() and (), self._future(), ping=True
            )
            part.jobs.put_first(job)
            asked.append(job.done)
        await asyncio.gather(*asked, return_exceptions=True)

    def close(self, timeout: float) -> None:
        """Commit what waits and close the database; at most ``timeout`` seconds."""
        until = time.monotonic() + timeout
        self._closing = True
        for part in self._parts.values():
            part.jobs.close()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if self._writer.lock is not None and not any(thread.is_alive() for thread in self._threads):
            self._writer.lock.release()
            self._writer.lock = None

    def _future(self) -> asyncio.Future[object]:
        return self._loop.create_future()

    async def _ask(
        self, jobs: JobQueue, work: Callable[[sqlite3.Connection], T], client: LedgerClient, size: int = 0
    ) -> T:
        if self.ended.done():
            raise LedgerError(f"a thread of the ledger {self.path} has ended")
        if self._silent_since:  # what waits for it has a share of what may wait in all
            raise LedgerError(f"the ledger {self.path} is away: {self.state.reason}")
        done: asyncio.Future[T] = self._loop.create_future()
        jobs.put(LedgerJob(work, done, client, size))
        return await done

    # --- on the threads ---

    def _run(self, part: LedgerWriter | LedgerReader) -> None:
        error: BaseException = RuntimeError("it returned")
        try:
            if part is self._writer:
                self._begin()
            part.run()
        except BaseException as raised:  # noqa: BLE001 (all that it may be means the same: this thread is over)
            error = raised
        if self._closing:
            return
        name = threading.current_thread().name
        log.critical("the thread %s has ended: %s", name, told(error), exc_info=error)
        self._on_loop(self._end, f"the thread {name} has ended: {told(error)}")

    def _end(self, why: str) -> None:
        """Nobody must wait for what will never be answered."""
        if not self.ended.done():
            self.ended.set_exception(RuntimeError(why))
        for part in self._parts.values():
            _resolve(
                [(job, LedgerError(why)) for job in (*part.in_hand, *part.jobs.take(1 << 30, 1 << 62, 0.0))]
            )

    def _answer(self, results: Sequence[tuple[LedgerJob, object]]) -> None:
        self._on_loop(_resolve, results)

    def _on_loop(self, call: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(call, *arguments)

    def _begin(self) -> None:
        """On the writer's thread: what asks the disk for the first time, which may hang."""
        path = Path(os.path.realpath(self.path))
        for part in self._parts.values():
            part.path = path
        refused: StartError | None = None
        try:
            self._writer.hold()
        except StartError as error:
            refused = error
        except OSError:
            pass  # opening says what is wrong, and tries again
        self._on_loop(self._first_locked, refused)
        if refused is not None:
            time.sleep(REFUSED_SECONDS)

    def _first_attempt(self) -> None:
        """On the writer's thread."""
        for reader in self._writer.readers:
            reader.ready.set()
        self._on_loop(self._first_opened)

    def _first_locked(self, refused: StartError | None) -> None:
        if not self._locked.done():
            self._locked.set_result(refused)

    def _first_opened(self) -> None:
        if not self.opened.done():
            self.opened.set_result(None)


def _resolve(results: Iterable[tuple[LedgerJob, object]]) -> None:
    for job, result in results:
        if job.done.done():
            continue
        if isinstance(result, Exception):
            job.done.set_exception(result)
        else:
            job.done.set_result(result)


def _record_size(record: TransferRecord) -> int:
    """About the memory that a record takes, in bytes: its numbers and dictionaries, and what of it may be long."""
    runs = sum(len(part.runs) for part in (*record.local_blocks, *record.remote_blocks))
    parts = len(record.groups) + len(record.stages) + len(record.moments) + len(record.checksum.groups)
    names = (
        len(record.cause) + len(record.request_id) + len(record.transfer_id) + len(record.remote_request_id)
    )
    return 3000 + 120 * (runs + parts + len(record.remote_ranks)) + names
