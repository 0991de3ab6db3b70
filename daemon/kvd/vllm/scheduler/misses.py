"""The scheduler's side of forced misses: what operators ordered, which loads it takes, and what becomes of those.

Orders come on the session's thread, all else happens in the scheduler's step; the lock between them is only ever held
for a few dictionary operations. A forced miss takes the way of every other miss: what is here decides that a load is to
miss, and watches.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from kvd.vllm.scheduler.claim import Claim, ClaimState
from kvd.vllm.scheduler.miss_plan import DecodingEngine, make_plan, planned
from kvd.vllm.vllm_types import VllmRequest, VllmStep
from kvd.wire.frame import Message
from kvd.wire.order import (
    MISS_ENDS,
    ClearForced,
    ForcedCleared,
    ForceMiss,
    ForcePlan,
    Miss,
    MissState,
    NextLoads,
    OrderState,
    PlannedMiss,
    ReportForced,
)
from kvd.wire.reply import Refused, refusal
from kvd.worker.cause import Cause
from kvd.worker.orders import Fault

MAX_OPEN = 16
"""Most orders for further loads that an engine takes at a time."""
MAX_FOLLOWED = 4096
"""Most forced misses that are on their way at a time; further loads are left alone."""
FINISHED_KEPT = 1024
"""Requests that are remembered as finished, for a better answer than that they are unknown."""
REPORT_SECONDS = 60.0
"""How long a report is kept for a kvd that is away."""
_COMPLETE = "its load was complete before the order reached it"


@dataclass(slots=True, eq=False)
class _Order:
    """An order that is carried out; ``began`` is time.monotonic()."""

    message: ForceMiss
    plan: ForcePlan
    asked: float
    began: float
    open: bool = False
    looked: int = 0
    taken: int = 0
    changed: bool = False
    random: random.Random = field(default_factory=random.Random)


@dataclass(slots=True, eq=False)
class _Followed:
    """A forced miss from its order to its end; while it is ``ordered`` no load was ordered for it yet."""

    order: _Order
    miss: Miss

    @property
    def ordered(self) -> bool:
        return self.miss.state == "ordered"


class Forced:
    """All orders of one engine, and the misses that they made."""

    def __init__(self, engine: DecodingEngine) -> None:
        self._engine = engine
        self._claims: Callable[[], Sequence[Claim]] = tuple
        self._deliver: Callable[[str, Message, float], object] = _nowhere
        self._lock = threading.Lock()
        self._requests: dict[str, VllmRequest] = {}
        self._finished: deque[str] = deque(maxlen=FINISHED_KEPT)
        self._standing: list[_Order] = []
        self._followed: dict[str, _Followed] = {}

    def connect(
        self, claims: Callable[[], Sequence[Claim]], deliver: Callable[[str, Message, float], object]
    ) -> None:
        """``claims`` gives all claims as they are now, on any thread; ``deliver`` is the session's."""
        self._claims, self._deliver = claims, deliver

    # --- on the session's thread ---

    def asked(self, message: Message) -> Message | None:
        """Answer an operator's order; None for any other message."""
        if isinstance(message, ForceMiss):
            return self._asked(message)
        if isinstance(message, ClearForced):
            return self._clear(message)
        return None

    def _asked(self, message: ForceMiss) -> Message:
        plan = make_plan(message, self._engine, self._claims(), list(self._requests), list(self._finished))
        if isinstance(plan, Refused) or not message.carry_out:
            return plan
        with self._lock:
            self._standing = [order for order in self._standing if order.open]
            if len(self._standing) >= MAX_OPEN or len(self._followed) + len(plan.requests) > MAX_FOLLOWED:
                return refusal(
                    code="KVD-FORCE-BUSY",
                    message=f"{len(self._standing)} orders are open and {len(self._followed)} forced misses under way",
                    hint="end some with `kvctl force-miss --clear`",
                )
            order = _Order(message, plan, time.time(), time.monotonic())
            if isinstance(message.target, NextLoads):
                order.open = True
                order.random.seed(message.target.seed)
                self._standing.append(order)
            for request in plan.requests:
                if request.request_id not in self._followed:
                    self._report(order, self._follow(order, request).miss)
            self._report(order)
        return plan

    def _clear(self, message: ClearForced) -> Message:
        with self._lock:
            ended = [
                order
                for order in self._standing
                if order.open and message.order_id in ("", order.plan.order_id)
            ]
            for order in ended:
                order.open = False
                self._report(order)
            self._standing = [order for order in self._standing if order.open]
        return ForcedCleared(tuple(order.plan.order_id for order in ended))

    # --- within a step ---

    def arrived(self, request: VllmRequest) -> None:
        """A request came whose KV is elsewhere."""
        self._requests[request.request_id] = request

    def fault(self, claim: Claim) -> Fault | None:
        """How the load that is about to be ordered for a claim is to miss, if it is."""
        if not self._followed and not self._standing:
            return None
        with self._lock:
            followed = self._followed.get(claim.request_id)
            if not claim.again:  # what is claimed again after a miss is no further load
                taken = self._draw(claim)
                followed = followed or taken
            if followed is None or not followed.ordered:
                return None
            self._advance(followed, "forced", "forced")
            return _fault(followed.order, began=False)

    def take(self, output: VllmStep | None) -> list[tuple[str, Fault]]:
        """Loads under way that are to be given up, by request; and have a look at what the step computes."""
        if not self._followed and not self._standing:
            return []
        faults = []
        with self._lock:
            if wanted := [followed for followed in self._followed.values() if followed.ordered]:
                claims = {claim.request_id: claim for claim in self._claims()}
                for followed in wanted:
                    request_id = followed.miss.request_id
                    claim = claims.get(request_id)
                    if claim is None or not claim.waiting:
                        over = claim is None or claim.state is ClaimState.RELEASED
                        if over or followed.order.message.when == "before":
                            self._change(followed, state="late", cause=_COMPLETE)
                        else:
                            self._advance(followed, "forced", "forced")
                            faults.append((request_id, _fault(followed.order, began=True)))
            self._look(output)
            for order in self._standing:
                self._close_if_over(order)
                if order.changed:
                    self._report(order)
            self._standing = [order for order in self._standing if order.open]
        return faults

    def load_ended(self, request_id: str, cause: Cause | None, quiesced_at: float) -> None:
        """A load ended on all workers; at time.monotonic() ``quiesced_at`` nothing of it could land any more."""
        if request_id not in self._followed:
            return
        with self._lock:
            followed = self._followed[request_id]
            if followed.miss.state != "forced":
                return
            if not cause:
                self._change(followed, state="late", cause=_COMPLETE)
                return
            now = time.monotonic() - followed.order.began
            quiesced = min(now, max(followed.miss.steps["forced"], quiesced_at - followed.order.began))
            steps = {**followed.miss.steps, "quiesced": quiesced, "reported": now}
            self._change(followed, state="reported", steps=steps, cause=cause.text)

    def spared(self, request_id: str, why: str) -> None:
        """No load will be ordered for this request."""
        if request_id not in self._followed:
            return
        with self._lock:
            if (followed := self._followed[request_id]).ordered:
                self._change(followed, state="late", cause=why)

    def over(self, request: VllmRequest) -> None:
        """The request has finished, or was aborted."""
        request_id = request.request_id
        if self._requests.pop(request_id, None) is None:
            return
        self._finished.append(request_id)
        if request_id not in self._followed:
            return
        with self._lock:
            followed = self._followed[request_id]
            if followed.miss.state == "rescheduled" and _has_output(request):
                self._advance(followed, "recovered", "first_token")
            else:
                self._change(followed, state="over", cause="the request ended before its first token")

    # --- private, with the lock held ---

    def _follow(self, order: _Order, request: PlannedMiss) -> _Followed:
        miss = Miss(
            request_id=request.request_id, prefiller=request.prefiller, state="ordered", tokens=request.tokens
        )
        followed = self._followed[request.request_id] = _Followed(order, miss)
        order.taken += 1
        return followed

    def _draw(self, claim: Claim) -> _Followed | None:
        """The order for further loads that takes this one; all that are open have a look at it."""
        taker = None
        for order in self._standing:
            self._close_if_over(order)
            target = order.message.target
            if not order.open or not isinstance(target, NextLoads):
                continue
            order.looked += 1
            order.changed = True
            hit = order.random.random() < target.ratio and len(self._followed) < MAX_FOLLOWED
            if hit and taker is None and claim.request_id not in self._followed:
                taker = self._follow(order, planned(claim, self._engine))
            self._close_if_over(order)
        return taker

    @staticmethod
    def _close_if_over(order: _Order) -> None:
        target = order.message.target
        if not order.open or not isinstance(target, NextLoads):
            return
        late = time.monotonic() - order.began > target.seconds
        if late or (target.count and order.looked >= target.count):
            order.open = False
            order.changed = True

    def _look(self, output: VllmStep | None) -> None:
        for request_id, followed in list(self._followed.items()):
            request = self._requests.get(request_id)
            if request is None:
                continue
            state = followed.miss.state
            if state == "reported" and output is not None and request_id in output.num_scheduled_tokens:
                kept = min(request.num_computed_tokens, request.num_prompt_tokens)
                recomputed = request.num_prompt_tokens - kept
                followed.miss = msgspec.structs.replace(followed.miss, kept=kept, recomputed=recomputed)
                self._advance(followed, "rescheduled", "rescheduled")
            elif state == "rescheduled" and _has_output(request):
                self._advance(followed, "recovered", "first_token")

    def _advance(self, followed: _Followed, state: MissState, step: str) -> None:
        steps = {**followed.miss.steps, step: time.monotonic() - followed.order.began}
        self._change(followed, state=state, steps=steps)

    def _change(self, followed: _Followed, **changes: Any) -> None:
        followed.miss = msgspec.structs.replace(followed.miss, **changes)
        if followed.miss.state in MISS_ENDS:
            self._followed.pop(followed.miss.request_id, None)
        self._report(followed.order, followed.miss)

    def _report(self, order: _Order, miss: Miss | None = None) -> None:
        """Tell kvd how an order stands, with one of its misses or by itself."""
        if miss is None:
            key, order.changed = f"order {order.plan.order_id}", False
        else:
            key = f"miss {order.plan.order_id} {miss.request_id}"
        state = OrderState(
            asker=order.message.asker,
            engine_id=self._engine.engine_id,
            incarnation=self._engine.incarnation,
            asked=order.asked,
            open=order.open,
            looked=order.looked,
            taken=order.taken,
            plan=order.plan,
        )
        self._deliver(key, ReportForced(order=state, miss=miss), REPORT_SECONDS)


def _nowhere(_key: str, _message: Message, _seconds: float) -> None:
    """Where reports go before the session stands: nobody has given an order yet."""


def _fault(order: _Order, *, began: bool) -> Fault:
    message = order.message
    cause = Cause(f"forced by {message.asker}", "FORCED")
    part = message.part
    fault = Fault(cause, "flight", rank=part.rank, group=part.group, layer=part.layer)
    if part.group is not None or part.layer:
        return replace(fault, when="layers")
    if message.when == "now":
        return replace(fault, when="flight" if began else "before")
    return replace(fault, when=message.when)


def _has_output(request: VllmRequest) -> bool:
    return len(request._all_token_ids) > request.num_prompt_tokens  # noqa: SLF001 - vLLM's only count of both
