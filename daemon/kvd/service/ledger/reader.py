"""A thread that answers questions about the ledger, each for a bounded time."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvd.service.errors import LedgerError, RequestRefused
from kvd.service.ledger.faults import FaultLog, fault_of, told
from kvd.service.ledger.jobs import JobQueue, LedgerJob
from kvd.service.ledger.state import LedgerState
from kvd.service.ledger.store import open_for_reading

STEPS = 5000
"""Steps of SQLite's machine between two looks at the clock: a fraction of a millisecond."""
WAIT_SECONDS = 1.0
READY_SECONDS = 0.05
"""How often it is looked whether the ledger was opened."""

_HANDED_ON = object()

HandOver = Callable[[Sequence[tuple[LedgerJob, object]]], None]
"""Hands results, or errors, to those who wait."""


class _InBetween(Exception):
    """Other files take the place of the ledger's just now."""


class LedgerReader:
    """Answers one question after the other, each for ``seconds`` at most.

    What takes longer goes to ``slower``, the queue of a reader with more time, or is refused where there is none. So
    short questions wait for short ones only. It begins when the first attempt at opening was made (``ready``).
    """

    def __init__(
        self, path: Path, jobs: JobQueue, seconds: float, slower: JobQueue | None, answer: HandOver
    ) -> None:
        self.jobs = jobs
        self.in_hand: list[LedgerJob] = []
        self.state: Callable[[], LedgerState] = LedgerState
        self.suspect: Callable[[int, str], None] = lambda *_: None
        self.ready = threading.Event()
        self.path = path
        self._seconds = seconds
        self._slower = slower
        self._answer = answer
        self._using = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._generation = 0
        self._until = 0.0
        self._leave = False
        self._faults = FaultLog(f"a question to the ledger {path} failed")

    def run(self) -> None:
        """Answer until the queue is closed."""
        while not self.ready.wait(READY_SECONDS) and not self.jobs.over:
            self._answer([(job, ()) for job in self.jobs.take_urgent()])
        while not self.jobs.over:
            self.in_hand = self.jobs.take(1, 1, WAIT_SECONDS)
            for job in self.in_hand:
                if (result := self._result(job)) is not _HANDED_ON:
                    self._answer([(job, result)])
            self.in_hand = []
        self.close_database()

    def close_database(self) -> None:
        """Close the connection, from any thread; a question that is being answered is cut short."""
        self._leave = True
        with self._using:
            self._leave = False
            if self._database is not None:
                self._database.close()
                self._database = None

    def _result(self, job: LedgerJob) -> object:
        """The answer or an error; `_HANDED_ON` where another reader has it now."""
        gives_up = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                with self._using:
                    return job.work(self._open())
            except _InBetween:  # the writer is at it: it must not find us in its way
                if time.monotonic() > gives_up:
                    return LedgerError(f"the ledger {self.path} is being set in order")
                time.sleep(READY_SECONDS / 10)
            except RequestRefused as error:
                return error
            except Exception as error:  # noqa: BLE001 (whatever it is, it is about this question: the thread goes on)
                if fault_of(error) == "interrupted" and time.monotonic() < self._until:
                    continue  # the writer wanted its connection closed
                return self._failure(job, error)

    def _failure(self, job: LedgerJob, error: Exception) -> object:
        fault = fault_of(error)
        if fault == "interrupted":
            return self._too_long(job)
        if fault in ("damaged", "reopen"):
            self.close_database()
        if fault == "damaged":
            self.suspect(self._generation, told(error))
        self._faults.tell(error)
        return LedgerError(f"the ledger {self.path} cannot be read: {told(error)}")

    def _too_long(self, job: LedgerJob) -> object:
        if self._slower is not None:
            try:
                self._slower.put(job)
            except RequestRefused as error:
                return error
            return _HANDED_ON
        return RequestRefused(
            "KVD-QUESTION-TOO-LONG",
            f"the question took over {self._seconds:g} s of the ledger's time",
            hint="narrow it: ask for fewer rows, for a time (--since), or by the id of a request",
        )

    def _open(self) -> sqlite3.Connection:
        state = self.state()
        if self._database is not None and self._generation != state.generation:
            self._database.close()
            self._database = None
        if state.generation == 0 and state.open:
            raise _InBetween
        if state.generation == 0:
            raise LedgerError(f"the ledger {self.path} is away: {state.reason}")
        if self._database is None:
            self._database = open_for_reading(self.path)
            self._generation = state.generation
            self._database.set_progress_handler(lambda: self._leave or time.monotonic() > self._until, STEPS)
        self._until = time.monotonic() + self._seconds
        return self._database
