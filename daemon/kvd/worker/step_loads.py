"""The loads that steps order: they begin with their step, or ahead of it where the scheduler has the worker at hand.

A step's loads come to the worker when vLLM has prepared the step's inputs, a millisecond or more after it was
scheduled. By then they can be under way. All that earlier steps do on the device is queued when a step is scheduled,
and what the step itself computes has no use for the blocks of a load. A load waits for no more of the earlier steps
than may touch its blocks (`kvd.vllm.scheduler.freed_blocks`). Where the step zeroes or copies those beforehand its
scheduler says so (`kvd.vllm.early`). What vLLM copies of states without saying so it reads from blocks that their
requests still have.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvd.geometry.model import WorkerGeometry
from kvd.worker.cause import Cause
from kvd.worker.ends import LoadEnds
from kvd.worker.load import Load, Standing, load_of
from kvd.worker.orders import ClaimAnswer, LoadOrder, StepOrders
from kvd.worker.streams.event import StreamEvent
from kvd.worker.streams.gate import PATIENCE, StreamGate

IDLE_WAIT = 2e-3
"""Seconds that a step which computes nothing gives a load to end.

vLLM makes such steps one after the other while all of its requests wait for KV, and they would keep as many cores busy
as there are workers, and one more. A new request may have to wait that long. A short load ends within it, its claim
confirmed: with the next step its end would be known two milliseconds later.
"""
POSTING_WAIT = 1e-3
"""Seconds that an idle engine gives its loads to be posted. Their thread needs Python's lock for that, and has it at
once from a thread that waits; the bytes move while the engine goes on."""
SOON = 5e-3
"""Seconds within which a load is due that an engine without other work waits for, and makes no step meanwhile."""
MARKS = 16
"""Marked steps of which it is kept what was queued before them."""
NEAR, NEAR_PAST = 3e-4, 2e-4
"""Seconds within which a load is due that a step with other work is put off for, and how long after that it begins
anyway. The step after it would be the next to use the load, some 2.5 ms later."""


class StepLoads:
    """Used on the thread of the steps."""

    def __init__(
        self,
        geometry: WorkerGeometry,
        record_event: Callable[[], StreamEvent | None],
        ends: LoadEnds,
        proceed: Callable[[Load], None],
        refuse: Callable[[Load, Cause], None],
        in_step: Callable[[Load], None],
    ) -> None:
        """``proceed`` has a load whose device is ready, ``refuse`` one that must not begin; on any thread.

        ``in_step`` is told of each that the coming step uses, on this one.
        """
        self.begun: dict[str, Load] = {}
        """By request: those that were not reported."""
        self._geometry = geometry
        self._record_event = record_event
        self._ends = ends
        self._proceed = proceed
        self._refuse = refuse
        self._in_step = in_step
        self._reached: StreamEvent | None = None
        self._marks: deque[tuple[int, StreamEvent]] = deque(maxlen=MARKS)
        """The last marked steps: what was queued on the device before each, its changes of blocks included."""
        self._gate = StreamGate(proceed, refuse)

    def ahead(self, orders: StepOrders) -> None:
        """Ahead of a step: loads must wait for what is queued on the device by now, and not for more.

        The step is not marked yet: what it changes of blocks is queued later.
        """
        self._reached = None
        if self._marks and 0 < orders.number <= self._marks[-1][0]:  # another scheduler counts
            self._marks.clear()

    def bound(self, orders: StepOrders) -> None:
        """Before a step, once what it changes of blocks is queued. As `ahead`, and its mark."""
        self.ahead(orders)
        if orders.number and (orders.marked or not self._marks) and (reached := self._now()) is not None:
            self._marks.append((orders.number, reached))
        for order in orders.loads:  # what they need is recorded now: when they begin the step may be queued
            self._device_for(order)

    def begin(self, orders: StepOrders) -> None:
        """Begin the loads of a step."""
        if not orders.loads:
            return
        now = time.monotonic()
        look_until = now + PATIENCE if orders.idle else 0.0
        for order in orders.loads:
            self._begin(order, now, look_until)

    def answered(self, answers: Iterable[ClaimAnswer]) -> None:
        """How claims were answered, beside which loads run."""
        for answer in answers:
            if load := self.begun.get(answer.request_id):
                self._ends.answered(load, answer)

    def over(self, load: Load) -> None:
        """It was reported. Another request may have its name by now."""
        if self.begun.get(load.order.request_id) is load:
            del self.begun[load.order.request_id]

    def give_time(self, orders: Sequence[LoadOrder], wait: float) -> None:
        """Give pulls that have begun ``wait`` seconds to be posted."""
        until = time.monotonic() + wait
        for order in orders if wait else ():
            load = self.begun.get(order.request_id)
            if load is not None and not order.transfer_id:
                load.under_way.wait(max(0.0, until - time.monotonic()))

    def worth_waiting(self, now: float) -> float:
        """Seconds in which a load that is posted should end, with its claim answered; 0 where that is not soon."""
        dues = [load.pieces.due or now for load in self._awaited()]
        # For one that is late already nobody waits again.
        left = min((due - now for due in dues if due > now - IDLE_WAIT), default=SOON + 1)
        return max(0.0, left) + IDLE_WAIT if left <= SOON else 0.0

    def nearly_there(self, now: float) -> float:
        """Seconds to put off a step that computes; 0 where no load is known to end at once."""
        dues = [load.pieces.due for load in self._awaited()]
        left = min((due - now for due in dues if due > now - NEAR_PAST), default=NEAR + 1)
        return max(0.0, left) + NEAR_PAST if left <= NEAR else 0.0

    def close(self, until: float) -> None:
        """Refuse what waits for the device, to time.monotonic() ``until``."""
        self._gate.close(until)

    def _awaited(self) -> list[Load]:
        """Those that are posted, and that a step to come will use."""
        return [load for load in self.begun.values() if load.under_way.is_set() and not load.order.in_step]

    def _begin(self, order: LoadOrder, now: float, look_until: float) -> None:
        load = self.begun[order.request_id] = load_of(order, now)
        if order.in_step:
            self._in_step(load)
        if load.claim.standing is Standing.OPEN:
            self._ends.begin(load)
        if order.fault is not None and order.fault.concerns(self._geometry):
            load.fault = order.fault
        if order.refused:
            self._refuse(load, order.refused)
        elif load.fault is not None and load.fault.when == "before":
            self._refuse(load, load.fault.cause)
        elif order.seconds <= 0:
            self._refuse(load, Cause("the lease on its blocks ran out before the load began", "LEASE_ENDED"))
        elif (event := self._device_for(order)) is not None and not self._gate.is_open(event, look_until):
            self._gate.put(load, event)
        else:
            self._proceed(load)

    def _device_for(self, order: LoadOrder) -> StreamEvent | None:
        """What the device must have come to before a load may begin: all steps that may touch its blocks are done."""
        if order.after is not None:
            for number, event in self._marks:
                if number > order.after:
                    return event
        return self._now()

    def _now(self) -> StreamEvent | None:
        """What is queued on the device by now; recorded once for a step, and only where a load or a mark needs it."""
        if self._reached is None:
            self._reached = self._record_event()
        return self._reached
