"""Loads that are used in the very step that orders them: the device runs the step behind them.

A step's inputs take longer to prepare than most loads take. Where the transfers are the device's own work, its stream
is told to wait for them, and the host goes on. So nothing of the load is seen in the time until the first token, unless
it takes longer than that work.

Whether such a load stands is known later: its claim may be refused, or a transfer may fail. The step's results are
taken only after that is known, and of a miss they are thrown away (`kvd.vllm.scheduler.in_step`).

Until then no other thread has anything to do with it. It is posted on the thread of the steps, which also looks whether
it is here: another thread would have to get Python's lock for that, and would take it from the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from kvd.backends.errors import BackendError
from kvd.geometry.model import WorkerGeometry
from kvd.worker.cause import REQUEST_OVER, Cause
from kvd.worker.ends import LoadEnds
from kvd.worker.load import Load, Standing
from kvd.worker.orders import ClaimAnswer, StepOutcomes
from kvd.worker.peer_threads import PeerThreads
from kvd.worker.remote import RemotePrefill
from kvd.worker.reporting import Reporting

StreamOf = Callable[[], int]
"""The handle of the stream that the calling thread's step is queued on."""
JOIN_SECONDS = 20e-3
"""How long a step waits for its loads to be posted. Then they are misses, if they still are not."""
STUCK_SECONDS = 1.0
"""How long it waits for one that a thread is posting. One that hangs in there is a miss, and is to end by itself."""
UNKNOWN_RATE = 50e9
"""Bytes a second that a load is taken to come with, before one has told of its lane, or a probe."""
UNORDERED = Cause("its lane is another one now, which its step could not wait for", "TRANSFER_FAILED")
NOT_POSTED = Cause(
    f"it was not posted within {JOIN_SECONDS * 1e3:g} ms, which its step was waiting for", "TOO_LATE"
)


def token_bytes(geometry: WorkerGeometry) -> float:
    """Bytes that a token of a long prompt has on a worker; windows and states count as if they held all."""
    return sum(layer.page.content / group.block_size for group in geometry.groups for layer in group.layers)


class InStepLoads:
    """Used on the thread of the steps, but for `post`."""

    def __init__(
        self,
        peers: PeerThreads,
        ends: LoadEnds,
        reporting: Reporting,
        note: Callable[[Iterable[Load]], None],
        stream_of: StreamOf | None,
        bytes_of_token: float,
    ) -> None:
        """``note`` takes note of loads that have ended. Without ``stream_of`` memory has no streams to order."""
        self._bytes_of_token = bytes_of_token
        self._peers = peers
        self._ends = ends
        self._reporting = reporting
        self._note = note
        self._stream_of = stream_of
        self._begun: list[Load] = []
        self._used: dict[str, Load] = {}

    # --- as a step is scheduled and queued ---

    def takes(self, prefill: RemotePrefill, tokens: int, most_seconds: float) -> bool:
        """Whether a load of so many tokens can be used in the step that orders it, and takes no longer than that."""
        if self._stream_of is None:
            return False
        thread = self._peers.pull_threads.get(prefill.engine_id)
        if thread is None:
            return False
        pace = thread.lanes.pace or self._bytes_of_token / (thread.probing.rate or UNKNOWN_RATE)
        seconds = tokens * pace
        return seconds <= most_seconds and thread.lanes.orders_streams(prefill.generation)

    def begun(self, load: Load) -> None:
        """A load of the coming step has begun."""
        self._begun.append(load)
        self._used[load.order.request_id] = load

    def post(self, load: Load) -> bool:
        """Post it on this thread, whichever it is; False where the thread of its lane has to."""
        return load.order.in_step and self._peers.begin_now(load)

    def join(self) -> None:
        """Before the step is queued: have it run behind its loads. Those that are not posted in time are misses."""
        if not self._begun:
            return
        loads, self._begun = self._begun, []
        until = time.monotonic() + JOIN_SECONDS
        for load in loads:
            if not load.under_way.wait(max(0.0, until - time.monotonic())):
                load.drop(NOT_POSTED)
                self._peers.withdraw(load)
                load.under_way.wait(STUCK_SECONDS)  # it is being posted at this moment
        for load in loads:
            self._precede(load)

    def _precede(self, load: Load) -> None:
        """Whatever goes wrong with that is a miss."""
        if load.cause or load.dropped or self._stream_of is None:
            return
        try:
            ordered = self._peers.precede(load, self._stream_of())
            cause = None if ordered else UNORDERED
        except BackendError as error:
            cause = Cause(error.message, "TRANSFER_FAILED")
        if cause:
            load.drop(cause)
            self._peers.give_up(load)

    # --- when the step is over ---

    def stands(self, request_id: str) -> bool:
        """Whether the load of a request is known to be good: it is here in time, its claim confirmed.

        Waits for nothing but the lane's lock.
        """
        load = self._used.get(request_id)
        if load is None or load.claim.standing is not Standing.CONFIRMED:
            return False
        spoilt = load.dropped or load.fault or load.cause
        return not spoilt and self._peers.landed(load)

    def ended(self, wait: float) -> StepOutcomes:
        """What became of loads that have ended since this was last asked; one is given ``wait`` seconds."""
        self._note(self._ends.take(wait))
        outcomes = self._reporting.tell_in_step()
        for request_id, cause in outcomes.loads.items():
            if load := self._used.pop(request_id, None):
                # One that was dropped may have come, but its step did not wait for it.
                outcomes.loads[request_id] = cause or load.dropped
        return outcomes

    def let_go(self, request_id: str) -> None:
        """The step is over, so other threads may have its load: to end it, and to write it down."""
        if load := self._used.get(request_id):
            self._peers.look_now(load)

    def answered(self, answers: Iterable[ClaimAnswer]) -> None:
        """How claims were answered."""
        for answer in answers:
            if load := self._used.get(answer.request_id):
                self._ends.answered(load, answer)

    def drop(self, request_id: str) -> None:
        """Nobody uses it any more."""
        if load := self._used.get(request_id):
            load.drop(REQUEST_OVER)
            self._ends.give_up(load)
            self._peers.look_now(load)
