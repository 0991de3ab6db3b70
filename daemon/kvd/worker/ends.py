"""Where every load of a worker ends: its checksums are compared, the step gets it, and the ledger a record of it."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
from collections.abc import Callable, Iterator

from kvd.geometry.model import WorkerGeometry
from kvd.topology.plan import Plan
from kvd.wire.transfer import ReportTransfers, TransferRecord
from kvd.worker.cause import Cause
from kvd.worker.checksums.comparing import Checking
from kvd.worker.pull.load import Load, record
from kvd.worker.push.arrival import Arrival, record_arrival
from kvd.worker.session import SessionProtocol
from kvd.worker.slow_paths import Paths

log = logging.getLogger(__name__)


class LoadEnds:
    """`load`, `arrival` and `refuse` are called on any thread, `take` in vLLM's step."""

    def __init__(
        self,
        engine_id: str,
        incarnation: str,
        backend: str,
        geometry: WorkerGeometry,
        session: Callable[[], SessionProtocol],
        checking: Checking,
        paths: Paths,
    ) -> None:
        self._incarnation = incarnation
        self._of_worker = {
            "engine_id": engine_id,
            "rank": str(geometry.rank),
            "backend": backend,
            "geometry": geometry,
        }
        self._session = session
        self._checking = checking
        self._paths = paths
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

    def load(self, load: Load) -> None:
        """It has ended."""
        if load.then is not None:
            load.then(load)
        else:
            self._compared(load, load.plan, functools.partial(record, load))

    def arrival(self, arrival: Arrival) -> None:
        """A pushed load has ended."""
        self._compared(arrival.load, arrival.plan, functools.partial(record_arrival, arrival))

    def _compared(self, load: Load, plan: Plan | None, made: Callable[..., TransferRecord]) -> None:
        def ended() -> None:
            self._ended.put(load)
            self._write_down(load, made)

        if not self._checking.begin(load, plan, ended):
            ended()

    def _write_down(self, load: Load, made: Callable[..., TransferRecord]) -> None:
        try:
            entry = made(**self._of_worker)
        except Exception:  # the load has ended all the same
            log.exception("no record of the load of %s", load.order.request_id)
            return
        self._paths.note(entry)
        self._session().deliver(
            f"transfer {entry.transfer_id} {load.ended}",
            ReportTransfers(incarnation=self._incarnation, records=(entry,)),
        )
