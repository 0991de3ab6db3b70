"""The decoding side's checksums: when all of a load has come, and before it is reported, its sums are compared.

What differs makes the load a miss. Sums that cannot be had do not: the record says why.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet

import numpy as np

from kvd.client.errors import ClientError, RefusedByDaemon
from kvd.geometry.errors import GeometryError
from kvd.shown import logger
from kvd.topology.checksums.comparison import Comparison, WantedSums, comparison
from kvd.topology.checksums.sums import Summer, Words
from kvd.topology.errors import NotSummable, TopologyError
from kvd.topology.plan import Plan
from kvd.topology.transfer_topology import TransferTopology
from kvd.wire.checksum import GetSums, Sums, SumsOf
from kvd.wire.frame import Message, kind_of
from kvd.wire.identity import Endpoint
from kvd.wire.transfer import ChecksumResult, GroupChecksum
from kvd.worker.cause import Cause
from kvd.worker.load import Load
from kvd.worker.orders import block_lists
from kvd.worker.session import SessionProtocol

log = logger(__name__)

WAIT_SECONDS = 5.0
"""How long the prefiller's sums are awaited at most; never longer than the load may take."""
AGAIN = (0.005, 0.2)
"""First and longest pause before sums that are not ready are asked for again; it doubles in between."""


class _SumsUnavailable(Exception):
    """The sums could not be compared; it says why."""


class Checking:
    """The comparisons of one decoding worker, each on a thread of its own: a prefiller may keep one waiting."""

    name = "checksums of loads"

    def __init__(
        self,
        topology: TransferTopology,
        summer: Callable[[], Summer],
        session: Callable[[], SessionProtocol],
    ) -> None:
        self._topology = topology
        self._summer = summer
        self._session = session
        self._adding = threading.Lock()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._closing = threading.Event()

    def begin(self, load: Load, ended: Callable[[], None]) -> bool:
        """Compare a load that has come, and call ``ended`` then, on another thread. False where that is not due."""
        plan = load.pieces.plan
        if load.cause or plan is None or not (load.sums or load.order.prefill.checksum):
            return False

        def run() -> None:
            try:
                self._check(load, plan)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())
                ended()

        thread = threading.Thread(target=run, name="kvd-check", daemon=True)
        with self._lock:
            if self._closing.is_set():
                return False
            self._threads.add(thread)
        thread.start()
        return True

    def stop(self) -> None:
        """Leave what is not known unknown, from now on."""
        self._closing.set()

    def join(self, until: float) -> bool:
        """Wait for the threads, to time.monotonic() ``until``. False where one may still read memory."""
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    # --- a comparison's thread ---

    def _check(self, load: Load, plan: Plan) -> None:
        began = time.monotonic()
        try:
            found = self._compared(load, plan, min(load.deadline, began + WAIT_SECONDS))
        except (_SumsUnavailable, GeometryError, TopologyError) as error:
            found = ChecksumResult(state="unknown", why=str(error))
        except Exception as error:  # the load has come all the same
            log.exception("checksums of the load of %s", load.order.request_id)
            found = ChecksumResult(state="unknown", why=f"{type(error).__name__}: {error}")
        seconds = time.monotonic() - began
        load.checksum = ChecksumResult(state=found.state, why=found.why, groups=found.groups, seconds=seconds)
        if found.state == "differs":
            wrong = "; ".join(f"group {g.group} {g.differs}" for g in found.groups if g.differs)
            load.spoil(Cause(f"checksums differ from the prefiller's: {wrong}", "CHECKSUM_MISMATCH"))

    def _compared(self, load: Load, plan: Plan, until: float) -> ChecksumResult:
        order = load.order
        remote = self._topology.find(order.prefill.engine_id)
        if remote is None or remote.generation != order.prefill.generation:
            raise _SumsUnavailable(f"prefiller {order.prefill.engine_id} is gone")
        if not self._session().state.connected:
            raise _SumsUnavailable("kvd is away")
        against = comparison(
            plan,
            self._topology.worker,
            remote.geometry.workers,
            block_lists(order.groups),
            tokens=order.tokens,
            total=order.prefill.tokens,
        )
        if not against.asks:
            return ChecksumResult()
        answers = {at: self._ask(load, against, at, until) for at in against.asks}
        with self._adding:
            own = against.own_sums(self._summer())
        theirs = {at: self._sums(load, against, at, future, until) for at, future in answers.items()}
        groups = tuple(GroupChecksum(g.group, g.layers, g.differs) for g in against.compare(own, theirs))
        return ChecksumResult(state="differs" if any(g.differs for g in groups) else "ok", groups=groups)

    def _ask(self, load: Load, against: Comparison, at: int, until: float) -> Future[Message]:
        prefill, rank = load.order.prefill, against.remotes[at].rank
        return self._session().call(
            GetSums(
                engine_id=prefill.engine_id,
                generation=prefill.generation,
                endpoint=Endpoint(prefill.host, prefill.port),
                rank=rank,
                request_id=load.order.transfer_id or prefill.request_id,
                wanted=tuple(_on_wire(wanted) for wanted in against.asks[at]),
            ),
            max(0.05, until - time.monotonic()),
        )

    def _sums(
        self, load: Load, against: Comparison, at: int, future: Future[Message], until: float
    ) -> list[Words]:
        """One worker's answer, asked for again while it is not ready."""
        who = f"prefiller {load.order.prefill.engine_id}/{against.remotes[at].rank}"
        pause = AGAIN[0]
        while True:
            try:
                answer = future.result(max(0.0, until - time.monotonic()))
            except RefusedByDaemon as error:
                late = time.monotonic() + pause >= until
                if error.refusal.final or late or self._closing.wait(pause):
                    raise _SumsUnavailable(f"{who}: {error.message}") from None
                pause = min(2 * pause, AGAIN[1])
                future = self._ask(load, against, at, until)
            except (ClientError, NotYet) as error:
                said = error.message if isinstance(error, ClientError) else "no answer in time"
                raise _SumsUnavailable(f"{who}: {said}") from None
            else:
                return _read(answer, load, who)


def _read(answer: Message, load: Load, who: str) -> list[Words]:
    if not isinstance(answer, Sums):
        raise _SumsUnavailable(f"{who} answered {kind_of(answer)}")
    if answer.tokens != load.order.prefill.tokens:
        raise NotSummable(
            f"{who} has checksums of {answer.tokens} tokens, its blocks hold {load.order.prefill.tokens}"
        )
    return [np.frombuffer(found, "<u8").astype(np.uint64) for found in answer.groups]


def _on_wire(wanted: WantedSums) -> SumsOf:
    classes = wanted.classes
    return SumsOf(wanted.group, wanted.first, wanted.blocks, classes.run, classes.period, wanted.which)
