"""Where every load of a worker ends: its checksums are compared, the step gets it, and the ledger a record of it."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator

from kvd.geometry.model import WorkerGeometry
from kvd.shown import logger
from kvd.wire.transfer import ReportTransfers, TransferRecord, bounded
from kvd.worker.cause import Cause
from kvd.worker.checksums.comparing import Checking
from kvd.worker.load import Load
from kvd.worker.records import record
from kvd.worker.session import SessionProtocol
from kvd.worker.slow_paths import Paths
from kvd.worker.tally import TransferTally

log = logger(__name__)


class LoadEnds:
    """`load` and `refuse` are called on any thread, `take` in vLLM's step."""

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

    def take(self, wait: float = 0.0) -> Iterator[Load]:
        """Loads that ended since this was last asked; the first is waited for so many seconds."""
        with contextlib.suppress(queue.Empty):
            if wait:
                yield self._ended.get(timeout=wait)
            while True:
                yield self._ended.get_nowait()

    def refuse(self, load: Load, cause: Cause) -> None:
        """It ends before anything was read or announced."""
        load.end(cause)
        self.load(load)

    def load(self, load: Load, complete: Callable[[TransferRecord], TransferRecord] | None = None) -> None:
        """It has ended; ``complete`` adds to its record what its caller knows of it."""

        def ended() -> None:
            self._ended.put(load)
            self._write_down(load, complete)

        if load.then is not None:
            load.then(load)
        elif not self._checking.begin(load, ended):
            ended()

    def _write_down(self, load: Load, complete: Callable[[TransferRecord], TransferRecord] | None) -> None:
        try:
            entry = record(load, engine_id=self._engine_id, backend=self._backend, geometry=self._geometry)
            entry = bounded(complete(entry) if complete else entry)
        except Exception:  # the load has ended all the same
            log.exception("no record of the load of %s", load.order.request_id)
            return
        self._paths.note(entry)
        self._tally.note(entry)
        self._session().deliver(
            f"transfer {entry.transfer_id} {load.ended}",
            ReportTransfers(incarnation=self._incarnation, records=(entry,)),
        )
