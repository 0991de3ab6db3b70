"""The thread that writes the ledger: in batches, within its bounds, and again where its files were lost.

It is in one of three states. *Open*: it writes. *Away*: there is no database, records are refused, and opening is tried
again and again. *Homeless*: the database is open, but its files are gone or others stand under their names; records
are refused until all that it holds is on disk again under these names.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from kvd.service.config import LedgerSettings
from kvd.service.errors import LedgerError, RequestRefused, StartError
from kvd.service.ledger import files, lock, opening, store
from kvd.service.ledger.faults import CODED, FaultLog, fault_of, told
from kvd.service.ledger.jobs import JobQueue, LedgerJob
from kvd.service.ledger.pruning import Pruning
from kvd.service.ledger.reader import HandOver, LedgerReader
from kvd.service.ledger.salvage import Salvage
from kvd.service.ledger.state import LedgerState
from kvd.service.ledger.steady import SteadyClock
from kvd.wire.identity import EngineCard
from kvd.wire.transfer import TransferRecord

log = logging.getLogger(__name__)

BATCH = 512
"""Most jobs of one commit."""
BATCH_BYTES = 4 << 20
"""About the most that one commit takes up, as `LedgerJob.size` has it: a tenth of a second's work."""
LOOK_SECONDS = 1.0
"""How often the writer looks whether its files are there while nothing is written; after each commit it does anyway."""
RETRY_SECONDS = (0.25, 10.0)
"""First and longest pause before what failed is tried again."""
BREATH_SECONDS = 0.002
"""Pause between two parts of work in the background."""
ATTEMPTS = 2
"""How often a batch is tried."""


class LedgerWriter:
    """What belongs to the writer's thread. Others read ``state``, and put jobs into ``jobs``.

    ``known`` are the engines of which a description is kept; the loop adds those of an acknowledged commit.
    """

    def __init__(
        self,
        path: Path,
        settings: LedgerSettings,
        runtime: str,
        jobs: JobQueue,
        answer: HandOver,
        clock: SteadyClock,
    ) -> None:
        self.settings = settings
        self.path = path
        self.jobs = jobs
        self.readers: Sequence[LedgerReader] = ()
        self.state = LedgerState(since=time.monotonic())
        self.known: set[store.EngineKey] = set()
        self.in_hand: list[LedgerJob] = []
        self.opened: Callable[[], None] = lambda: None
        self.lock: lock.StateLock | None = None
        self._runtime = runtime
        self._answer = answer
        self._clock = clock
        self._pruning = Pruning(clock)
        self._database: sqlite3.Connection | None = None
        self._identity: files.FileIdentity = ()
        self._homeless = False
        self._opened = 0
        self._total = 0
        self._highest = 0
        self._held: list[tuple[LedgerJob, object]] = []
        self._salvages: list[Salvage] = []
        self._suspected = (0, "")
        self._told = False
        self._retry_at = 0.0
        self._pause = RETRY_SECONDS[0]
        self._look_at = 0.0
        self._seen: dict[store.EngineKey, float] = {}
        self._faults = FaultLog(f"a report to the ledger {path} failed")

    def run(self) -> None:
        """Write until the queue is closed and empty."""
        while not self.jobs.over:
            self.in_hand = self.jobs.take(BATCH, BATCH_BYTES, self._wait())
            try:
                self._turn(self.in_hand)
            except Exception as error:  # noqa: BLE001 (memory ran out, or a mistake of ours: it must not end the thread)
                self._held.clear()
                self._trouble(error)
                self._refuse(self.in_hand)
            self.in_hand = []
        if self._homeless:
            self._write_again()
        self._close()

    def suspect(self, generation: int, why: str) -> None:
        """A reader of the files of that generation found damage. From any thread."""
        self._suspected = generation, why

    # --- one turn ---

    def _turn(self, jobs: list[LedgerJob]) -> None:
        now = time.monotonic()
        if now >= self._retry_at:
            if self._homeless:
                self._write_again()
            elif self._database is None:
                self._open()
            elif not self.state.open:
                self._probe()
        if jobs:
            # What failed may have healed what it failed at: a damaged file is another one now.
            for _ in range(ATTEMPTS):
                if self._database is not None and not self._homeless and self._commit(self._database, jobs):
                    break
            else:
                self._refuse(jobs)
        if self._database is not None and not self._homeless:
            self._look_after(self._database, now)

    def _wait(self) -> float:
        """How long to wait for jobs: not at all where there is something else to do."""
        if self._database is not None and not self._homeless and (self._salvages or self._pruning.more):
            return BREATH_SECONDS
        if self.state.open:
            return LOOK_SECONDS
        return min(LOOK_SECONDS, max(0.0, self._retry_at - time.monotonic()))

    def _commit(self, database: sqlite3.Connection, jobs: list[LedgerJob]) -> bool:
        """Do the jobs in one transaction, and answer them; whether that was possible."""
        try:
            with store.transaction(database):
                results = [(job, self._result(database, job)) for job in jobs]
                came = sum(len(result) for _, result in results if isinstance(result, tuple))
                gone = self._pruning.with_commit(database, self.settings, self._total, came)
        except (sqlite3.Error, MemoryError) as error:
            self._trouble(error)
            return False
        self._count(came - gone)
        if came:
            self._highest = store.last_seq(database)
        self._held = results
        if self._in_place():  # else they are answered once they are written where they can be found again
            self._well()
            self._answer_held()
        return True

    def _result(self, database: sqlite3.Connection, job: LedgerJob) -> object:
        """What a job gives, or its error; undone where it failed. Raises what is about the database, not the job."""
        database.execute("SAVEPOINT job")
        try:
            result = job.work(database)
        except Exception as error:
            if fault_of(error) != "job" or not database.in_transaction:
                raise
            database.execute("ROLLBACK TO job")
            database.execute("RELEASE job")
            self._faults.tell(error)
            return LedgerError(f"the ledger {self.path} cannot take this: {told(error)}")
        database.execute("RELEASE job")
        return result

    def write(
        self, database: sqlite3.Connection, records: tuple[TransferRecord, ...], engines: Sequence[EngineCard]
    ) -> tuple[TransferRecord, ...]:
        """A job's work: records, engines that they name, and that these are in use. Gives the records that are new."""
        store.keep_engines(database, engines, self._clock.wall())
        now = time.monotonic()
        named = (
            store.named_engines(records) & self.known
        )  # records may name anything: the rest is not remembered
        stale = [key for key in named if now - self._seen.get(key, 0.0) > store.REFRESH_SECONDS]
        if stale:
            self._seen = {key: at for key, at in self._seen.items() if now - at <= store.REFRESH_SECONDS}
            self._seen |= dict.fromkeys(stale, now)
            store.refresh_engines(database, stale, self._clock.wall())
        return store.insert(database, records, self._clock.wall())

    def _look_after(self, database: sqlite3.Connection, now: float) -> None:
        """What is to be done besides: files that are gone, damage, records beyond the bounds, or in a damaged file."""
        try:
            (generation, why), self._suspected = self._suspected, (0, "")
            if generation == self._opened and self._in_place():
                self._damaged(why)
            elif now >= self._look_at:
                self._look_at = now + LOOK_SECONDS
                self._note_aside()
                if self._in_place():
                    self._keep_lock()
            if self._database is not database or self._homeless:
                return
            gone, engines = self._pruning.part(database, self.settings, self._total)
            self._count(-gone)
            if engines:
                self.known = store.known_engines(database)
            if self._salvages:
                self._salvage(database, self._salvages[0])
        except (sqlite3.Error, OSError) as error:
            self._trouble(error)

    def _salvage(self, database: sqlite3.Connection, salvage: Salvage) -> None:
        before = salvage.taken
        more = salvage.part(database)
        self._count(salvage.taken - before)
        if not more:
            self._salvages.remove(salvage)
            self.known = store.known_engines(database)
            log.warning("a ledger was set aside: %s", salvage.close(self.path, self.settings.max_bytes))

    def _between(self) -> None:
        """Called while a statement runs: who only asks whether the thread lives is answered."""
        if pings := self.jobs.take_urgent():
            self._answer([(job, ()) for job in pings])

    # --- opening, and what goes wrong ---

    def _open(self, *, again: bool = True) -> None:
        """Open the database, and set aside what is none. Where that fails it is tried again later."""
        try:
            self.hold()
            if not self._opened:
                files.complete(self.path)
            database = opening.open_anyhow(self.path, self._between)
            try:
                self._salvages = [Salvage(path) for path in files.waiting(self.path, store.SCHEMA)]
                store.number_after(database, max([self._highest, *(s.highest for s in self._salvages)]))
                self._total = store.count(database)
                self.known = store.known_engines(database)
                self._highest = store.last_seq(database)
            except BaseException:
                database.close()
                raise
        except (sqlite3.Error, OSError, StartError, MemoryError) as error:
            self._abandon()
            if fault_of(error) == "damaged" and again:
                opening.set_aside(self.path, told(error))
                self._open(again=False)
                return
            self._away(error)
        else:
            self._database, self._homeless = database, False
            self._identity = files.identity(self.path)
            self._opened += 1
            self._look_at = time.monotonic() + LOOK_SECONDS
            self._note_aside()
            self._well()
        self.opened()

    def hold(self) -> None:
        """Have the state directory to ourselves. Raises `StartError` and `OSError`."""
        if self.lock is not None and not self.lock.lost:
            return
        if self.lock is not None:
            old, self.lock = self.lock, None
            old.release()
        self.lock = lock.take(self.path.parent, self._runtime)

    def _keep_lock(self) -> None:
        """Somebody may have deleted the lock's file. Where another kvd has it by now this one writes no more."""
        try:
            self.hold()
        except StartError as error:
            self._close()
            self._away(error)

    def _trouble(self, error: Exception) -> None:
        """An error of the database's, not of a job's."""
        fault = fault_of(error)
        if self._database is None or self._homeless or not self._in_place():
            self._away(error)
        elif fault == "damaged":
            self._damaged(told(error))
        else:
            if fault == "reopen" and not store.readable(self._database):
                self._close()
            else:  # it can be asked, and perhaps opened no more where no file can grow
                self._make_room(self._database)
            self._away(error)

    def _damaged(self, why: str) -> None:
        """The open database is damaged: set it aside and begin a new one; its records come over bit by bit."""
        self._close()
        try:
            opening.set_aside(self.path, why)
        except OSError as error:
            self._away(error)
        else:
            self._open()

    def _in_place(self) -> bool:
        """Whether the files of the open database stand under its name; where not they are written again at once."""
        if files.identity(self.path) == self._identity:
            return True
        self._homeless = True
        log.warning("the files of the ledger %s are gone or replaced: they are written again", self.path)
        self._write_again()
        return False

    def _write_again(self) -> None:
        """Write the open database, whose files nobody finds any more, under its name again; answer what it took."""
        if self._database is None:
            return
        try:
            self.hold()
            opening.write_again(self._database, self.path, self._between)
        except (sqlite3.Error, OSError, StartError, MemoryError) as error:
            self._away(error)
            held, self._held = self._held, []
            self._answer([(job, self._refusal()) for job, _ in held])
            return
        # Only now: the last connection to close removes a log by its name, whosever that is.
        self._close()
        self._open()
        if self._database is not None:
            log.warning("the ledger %s is written again, with %d records", self.path, self._total)
        self._answer_held()

    def _make_room(self, database: sqlite3.Connection) -> None:
        """The disk may be full: give back the log's space, and have pruning free pages."""
        self._pruning.hurry()
        with suppress(sqlite3.Error):
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _probe(self) -> None:
        try:
            if self._database is not None:
                store.probe(self._database)
                if self._in_place():
                    self._well()
        except (sqlite3.Error, MemoryError) as error:
            self._trouble(error)

    def _close(self) -> None:
        """Close every connection."""
        self.state = replace(self.state, generation=0)
        for reader in self.readers:
            reader.close_database()
        self._abandon()
        if self._database is not None:
            with suppress(sqlite3.Error):
                self._database.close()
        self._database, self._homeless = None, False

    def _abandon(self) -> None:
        for salvage in self._salvages:
            salvage.abandon()
        self._salvages = []

    # --- what is told ---

    def _away(self, error: Exception) -> None:
        now, reason = time.monotonic(), getattr(error, "message", "") or told(error)
        if now >= self._retry_at:
            self._retry_at, self._pause = now + self._pause, min(2 * self._pause, RETRY_SECONDS[1])
        if self.state.open or self.state.reason != reason:
            since = now if self.state.open else self.state.since
            self.state, self._told = replace(self.state, open=False, reason=reason, since=since), True
            log.error("the ledger %s is away: %s; workers keep their records", self.path, reason, extra=CODED)

    def _well(self) -> None:
        self._pause, self._retry_at = RETRY_SECONDS[0], 0.0
        if self.state.open and self.state.generation == self._opened:
            return
        if self._told:
            log.warning("the ledger %s is open again", self.path)
        self._told = False
        now = time.monotonic()
        self.state = replace(
            self.state, open=True, reason="", since=now, rows=self._total, generation=self._opened
        )

    def _note_aside(self) -> None:
        if (aside := files.aside(self.path)) != self.state.aside:
            self.state = replace(self.state, aside=aside)

    def _count(self, more: int) -> None:
        self._total += more
        if self.state.rows != self._total:
            self.state = replace(self.state, rows=self._total)

    def _refusal(self) -> RequestRefused:
        return LedgerError(f"the ledger {self.path} is away: {self.state.reason}")

    def _refuse(self, jobs: Iterable[LedgerJob]) -> None:
        self._answer([(job, () if job.ping else self._refusal()) for job in jobs])

    def _answer_held(self) -> None:
        held, self._held = self._held, []
        self._answer(held)
