"""Orders to miss, as a scheduler reports them to its kvd."""

from __future__ import annotations

from kvd.wire.order import (
    AllWaiting,
    Asker,
    ForcePlan,
    OrderState,
)


def order(engine: str, order_id: str, incarnation: str, uid: int = 0) -> OrderState:
    plan = ForcePlan(
        order_id=order_id, engine_id=engine, target=AllWaiting(), when="now", policy="recompute", mode="pull", groups=1,
        channel="blocks", carried_out=True,
    )  # fmt: skip
    return OrderState(
        asker=Asker(order_id=order_id, uid=uid, pid=1), engine_id=engine, incarnation=incarnation, asked=0.0, open=True,
        looked=0, taken=0, plan=plan,
    )  # fmt: skip
