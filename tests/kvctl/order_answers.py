"""What a kvd with one decoding engine says to orders, the same every time."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvd.wire.frame import Message
from kvd.wire.order import (
    Asker,
    ClearForced,
    ForcedCleared,
    ForcedMisses,
    ForceMiss,
    ForcePlan,
    GetForced,
    Miss,
    NextLoads,
    OneRequest,
    OrderState,
    PlannedMiss,
)
from kvd.wire.reply import Refused

ORDER = "5f3a9c01d2e4"
ASKED = 1_795_000_100.0
STEPS = {"forced": 0.004, "quiesced": 0.0062, "reported": 0.0081, "rescheduled": 0.0083, "first_token": 0.41}
WAITING = (
    PlannedMiss(
        request_id="cmpl-4", prefiller="prefill-1", loading=False, tokens=1024, keeps=0, recomputes=1024
    ),
    PlannedMiss(
        request_id="cmpl-5", prefiller="prefill-1", loading=True, tokens=4096, keeps=512, recomputes=3584
    ),
)


def force(message: Message) -> Message:
    """The plan; only one request is known by name."""
    assert isinstance(message, ForceMiss)
    if isinstance(message.target, OneRequest) and message.target.request_id != "cmpl-4":
        name = message.target.request_id
        return Refused(
            code="KVD-FORCE-UNKNOWN",
            message=f"engine decode-0 has no request {name!r} that waits for KV from elsewhere",
            hint="`kvctl transfers` lists loads; --next 1 takes the next one, whatever it is called",
        )
    several = () if isinstance(message.target, NextLoads) else WAITING
    return ForcePlan(
        order_id=ORDER, engine_id=message.engine_id, target=message.target, when=message.when, policy="recompute",
        mode="pull", groups=1, channel="blocks", carried_out=message.carry_out,
        requests=several[:1] if isinstance(message.target, OneRequest) else several,
    )  # fmt: skip


PLAN = force(ForceMiss(engine_id="decode-0", target=OneRequest("cmpl-4"), carry_out=True))


def miss(number: int = 4, state: str = "recovered", steps: int = 5, **more: object) -> Miss:
    """A miss that has come so far."""
    known = dict(list(STEPS.items())[:steps])
    counts = {"kept": 0, "recomputed": 1024} if steps > 3 else {}
    given = {"cause": f"forced by uid 0, pid 4711, order {ORDER}", **counts, **more}
    fields = {"request_id": f"cmpl-{number}", "prefiller": "prefill-1", "state": state, "tokens": 1024}
    return msgspec.convert({**fields, "steps": known, **given}, Miss)


def forced(*misses: Miss, gone: str = "", **order: object) -> ForcedMisses:
    """An order with those misses."""
    assert isinstance(PLAN, ForcePlan)
    state = OrderState(
        asker=Asker(order_id=ORDER, uid=0, pid=4711), engine_id="decode-0", incarnation="i", asked=ASKED, open=False,
        looked=0, taken=1, plan=PLAN,
    )  # fmt: skip
    return ForcedMisses(
        order=msgspec.structs.replace(state, **order), misses=misses, revision=len(misses), gone=gone
    )


def get(message: Message) -> Message:
    """The one order, recovered."""
    assert isinstance(message, GetForced)
    if message.order_id not in ("", ORDER):
        what = f"no order {message.order_id!r} is known here"
        return Refused(code="KVD-ORDER-UNKNOWN", message=what, hint="kvd keeps the newest ones")
    return forced(miss())


ANSWERS: dict[type, Callable[[Message], Message | None]] = {
    ForceMiss: force,
    GetForced: get,
    ClearForced: lambda _: ForcedCleared((ORDER,)),
}
