"""Where every load of a worker ends: its checksums are compared, the step gets it, and later the ledger a record."""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import islice

from kvd.client.errors import RefusedByDaemon, Unencodable
from kvd.geometry.model import WorkerGeometry
from kvd.shown import logger
from kvd.wire.frame import Message
from kvd.wire.transfer import ReportTransfers, TransferRecord, bounded
from kvd.worker.cause import Cause
from kvd.worker.checksums.comparing import Checking
from kvd.worker.later import Later
from kvd.worker.load import Load
from kvd.worker.orders import ClaimAnswer
from kvd.worker.peers.slow_paths import Paths
from kvd.worker.pull.checked import CheckedReads
from kvd.worker.pull.unanswered import Unanswered
from kvd.worker.records import record
from kvd.worker.session import SessionProtocol
from kvd.worker.tally import TransferTally

log = logger(__name__)

MOST_TOLD = 16
"""Records in a message, of 150 KB each at most: kvd takes 4 MiB."""

Complete = Callable[[TransferRecord], TransferRecord]
"""Adds to a record what else is known of its load."""


class LoadEnds:
    """`load`, `refuse` and `confirmed` are called on any thread, all else in vLLM's step."""

    def __init__(
        self,
        engine_id: str,
        incarnation: str,
        backend: str,
        geometry: WorkerGeometry,
        session: Callable[[], SessionProtocol],
        checking: Checking,
        paths: Paths,
        tally: TransferTally,
    ) -> None:
        self._incarnation = incarnation
        self._engine_id = engine_id
        self._backend = backend
        self._geometry = geometry
        self._session = session
        self._checking = checking
        self._paths = paths
        self._tally = tally
        self._ended: queue.Queue[Load] = queue.Queue()
        self._unanswered = Unanswered()
        self._checked = CheckedReads(session)
        self._written: deque[tuple[str, TransferRecord]] = deque()
        self._later = Later(self._deliver)

    def take(self, wait: float = 0.0) -> Iterator[Load]:
        """Loads that ended since this was last asked; the first is waited for so many seconds."""
        if wait:
            with contextlib.suppress(queue.Empty):
                yield self._ended.get(timeout=wait)
        while not self._ended.empty():  # nobody else takes any
            yield self._ended.get_nowait()

    def refuse(self, load: Load, cause: Cause) -> None:
        """It ends before anything was read or announced, or with all that was read of it."""
        load.end(cause)
        load.spoil(cause)
        if not self._unanswered.give_up(load):
            self.ended(load)

    def begin(self, load: Load) -> None:
        """It begins beside its claim, of which kvd may have told."""
        self._unanswered.begin(load)

    def confirmed(self, reader: str, seconds: float) -> None:
        """Kvd says ahead of the scheduler that a claim was confirmed, for ``seconds`` from its sending."""
        self._unanswered.told(reader, seconds)

    def answered(self, load: Load, answer: ClaimAnswer) -> None:
        """The claim beside which it runs was answered; where it has ended, it is reported now."""
        if answer.refused:
            self._unanswered.refuse(load, answer.refused, answer.ago)
        else:
            self._unanswered.confirm(load, answer.seconds, answer.ago)

    def give_up(self, load: Load) -> None:
        """Nobody waits for it any more, nor for the answer on its claim."""
        self._unanswered.give_up(load)

    def ended(self, load: Load, complete: Complete | None = None) -> None:
        """It has ended; ``complete`` adds to its record what its caller knows of it."""
        if load.then is not None:
            load.then(load)
            return
        report = partial(self._report, load, complete)
        if load.order.checked:
            self._checked.check(load, report)
        elif not self._unanswered.keeps(load, report):
            report()

    def step(self, *, idle: bool) -> None:
        """A step begins. What has ended is written down if that computes nothing: it has no use for this thread."""
        self._later.stepped = time.monotonic()
        if idle:
            self._later.flush()

    def close(self, until: float) -> None:
        """Write all down; from now on that is done at once. Waits to time.monotonic() ``until`` at most."""
        self._later.close(until)

    def _report(self, load: Load, complete: Complete | None) -> None:
        if load.claim.refused:
            load.spoil(load.claim.refused)

        def hand_on() -> None:
            load.times.reported = time.monotonic()
            self._ended.put(load)
            self._later.put(partial(self._write_down, load, complete))

        if not self._checking.begin(load, hand_on):
            hand_on()

    def _record(self, load: Load, complete: Complete | None) -> TransferRecord | None:
        try:
            entry = record(load, engine_id=self._engine_id, backend=self._backend, geometry=self._geometry)
            return bounded(complete(entry) if complete else entry)
        except Exception:  # the load has ended all the same
            log.exception("no record of the load of %s", load.order.request_id)
            return None

    def _write_down(self, load: Load, complete: Complete | None) -> None:
        entry = self._record(load, complete)
        if entry is None:
            return
        self._paths.note(entry)
        self._tally.note(entry)
        self._written.append((f"transfer {entry.transfer_id} {load.times.ended}", entry))

    def _deliver(self) -> None:
        """Tell kvd of all that is written down."""
        while written := list(islice(self._taken(), MOST_TOLD)):
            told = self._tell(*written)
            if len(written) > 1:
                told.add_done_callback(partial(self._tell_each, written))

    def _tell(self, *written: tuple[str, TransferRecord]) -> Future[Message]:
        records = tuple(entry for _, entry in written)
        report = ReportTransfers(incarnation=self._incarnation, records=records)
        return self._session().deliver(written[0][0], report)

    def _tell_each(self, written: list[tuple[str, TransferRecord]], told: Future[Message]) -> None:
        """Tell of each by itself where all together were refused: it may be for one of them."""
        if not told.cancelled() and isinstance(told.exception(), (Unencodable, RefusedByDaemon)):
            for one in written:
                self._tell(one)

    def _taken(self) -> Iterator[tuple[str, TransferRecord]]:
        with contextlib.suppress(IndexError):  # another thread may take some
            while True:
                yield self._written.popleft()
