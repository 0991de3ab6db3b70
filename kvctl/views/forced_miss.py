"""The ForcedMiss document: what `kvctl force-miss` prints, planned or carried out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvctl.cli.numbers import clock, span
from kvctl.cli.units import Count, Seconds, Time, filled
from kvctl.ledger.statistics import quantile
from kvctl.views.registry import View, moment
from kvctl.views.screen import Cell, Column, ScreenPart, facts, number, state, table
from kvd.wire.order import STEPS, AllWaiting, ForcedMisses, ForcePlan, Miss, OneRequest, PlannedMiss, Target

ForcedMissState = Literal[
    "planned", "ordered", "forced", "reported", "rescheduled", "recovered", "late", "over"
]


class ForcedRequest(Struct, frozen=True, kw_only=True):
    """A request whose load is to miss, and how far that is."""

    request_id: str
    prefiller: str
    state: ForcedMissState
    tokens: Annotated[Count, Meta(description="tokens that the load would bring, with those that are here")]
    kept: Annotated[
        Count | None,
        Meta(description="tokens of the prompt that were not computed again; null until it is known"),
    ]
    recomputed: Annotated[
        Count | None,
        Meta(description="tokens of the prompt that were computed again; null until it is known"),
    ]
    cause: str
    steps: Annotated[
        dict[str, Seconds],
        Meta(description="seconds after the order: forced, quiesced, reported, rescheduled, first_token"),
    ]


class ForcedMiss(Struct, frozen=True, kw_only=True):
    """An order to have loads miss: who gave it, what it does, and what became of each request."""

    order_id: Annotated[str, Meta(description="empty of a plan that was not carried out")]
    engine_id: str
    carried_out: bool
    target: Annotated[str, Meta(description="the requests that it is about")]
    when: Literal["now", "before", "flight", "layers"]
    policy: str
    mode: str
    groups: Count
    channel: Annotated[
        Literal["blocks", "request"],
        Meta(description="how vLLM is told: blocks keeps what was computed before, request drops all"),
    ]
    uid: Annotated[int | None, Meta(description="user who gave it; null of a plan")]
    pid: Annotated[int | None, Meta(description="process that gave it; null of a plan")]
    asked: Annotated[Time | None, Meta(description="null of a plan")]
    open: Annotated[bool, Meta(description="further loads may still be taken")]
    looked: Annotated[Count, Meta(description="further loads that it had a look at")]
    taken: Annotated[Count, Meta(description="loads that it made miss, or is about to")]
    recovered: Count
    recovery_p50: Annotated[
        Seconds | None,
        Meta(description="from forced to the first token, median, in seconds; null without any"),
    ]
    recovery_p99: Seconds | None
    requests: tuple[ForcedRequest, ...]


class ClearedOrders(Struct, frozen=True, kw_only=True):
    """Orders for further loads that were ended."""

    engine_id: str
    order_ids: tuple[str, ...]


def planned_document(plan: ForcePlan) -> ForcedMiss:
    """The document of a plan that nobody carries out."""
    return filled(
        ForcedMiss,
        plan,
        order_id="",
        carried_out=False,
        target=target_text(plan.target),
        uid=None,
        pid=None,
        asked=None,
        open=False,
        looked=0,
        taken=0,
        recovered=0,
        recovery_p50=None,
        recovery_p99=None,
        requests=tuple(_planned(request) for request in plan.requests),
    )


def forced_document(forced: ForcedMisses) -> ForcedMiss:
    """The document of an order as it is now."""
    order, plan = forced.order, forced.order.plan
    seconds = list(_recovery(forced.misses))
    return filled(
        ForcedMiss,
        plan,
        order,
        order.asker,
        carried_out=True,
        target=target_text(plan.target),
        asked=moment(order.asked),
        taken=max(order.taken, len(forced.misses)),
        recovered=len(seconds),
        recovery_p50=quantile(seconds, 0.50) if seconds else None,
        recovery_p99=quantile(seconds, 0.99) if seconds else None,
        requests=tuple(filled(ForcedRequest, miss) for miss in forced.misses),
    )


def target_text(target: Target) -> str:
    """What an order is about, for people."""
    if isinstance(target, OneRequest):
        return f"request {target.request_id}"
    if isinstance(target, AllWaiting):
        return "all requests that wait for their KV"
    which = f"the next {target.count} loads" if target.count else "all further loads"
    if target.count == 1:
        which = "the next load"
    if target.ratio < 1:
        which += f", each with probability {target.ratio:g} (seed {target.seed})"
    return f"{which}, for {target.seconds:g} s at most"


def _planned(request: PlannedMiss) -> ForcedRequest:
    return filled(
        ForcedRequest,
        request,
        state="planned",
        kept=request.keeps,
        recomputed=request.recomputes,
        cause="its load is under way" if request.loading else "",
        steps={},
    )


def _recovery(misses: Iterable[Miss]) -> Iterable[float]:
    for miss in misses:
        if miss.state == "recovered":
            yield miss.steps["first_token"] - miss.steps["forced"]


CHANNELS = {
    "blocks": "what was computed before the load is kept",
    "request": "all that was computed is dropped",
}


def forced_miss_screen(body: ForcedMiss, wide: bool) -> ScreenPart:
    """The order, then one request a line: what it would lose, or the seconds after the order of each step."""
    several = "" if body.groups == 1 else f" ({body.groups} KV cache groups)"
    rows: list[tuple[str, Cell]] = [
        ("engine", f"{body.engine_id}, {body.mode}, policy {body.policy}"),
        ("misses", body.target),
        ("when", body.when),
        ("channel", f"{body.channel}{several}: {CHANNELS[body.channel]}"),
    ]
    if body.carried_out:
        at = f" at {clock(body.asked)}" if body.asked is not None else ""
        rows.insert(0, ("order", f"{body.order_id}, by uid {body.uid}, pid {body.pid}{at}"))
        rows.append(("so far", _progress(body)))
    if not body.requests:
        return facts(*rows)
    table = _timeline(body, wide) if body.carried_out else _plan(body)
    return [facts(*rows), "", table]


def cleared_orders_screen(body: ClearedOrders, _wide: bool) -> ScreenPart:
    """One order a line."""
    return table(
        body.order_ids, Column("ORDER", lambda order_id: order_id), Column("ENGINE", lambda _: body.engine_id)
    )


def _plan(body: ForcedMiss) -> ScreenPart:
    return table(
        body.requests,
        Column("REQUEST", lambda r: r.request_id),
        Column("FROM", lambda r: r.prefiller),
        number("TOKENS", lambda r: r.tokens),
        number("KEEPS", lambda r: r.kept),
        number("RECOMPUTES", lambda r: r.recomputed),
        Column("NOTE", lambda r: r.cause or "-"),
    )


def _timeline(body: ForcedMiss, wide: bool) -> ScreenPart:
    causes = wide or any(r.state in ("late", "over") for r in body.requests)
    return table(
        body.requests,
        Column("REQUEST", lambda r: r.request_id),
        Column("FROM", lambda r: r.prefiller),
        Column("STATE", lambda r: state(r.state)),
        *map(_step, STEPS),
        number("KEPT", lambda r: r.kept),
        number("RECOMPUTED", lambda r: r.recomputed),
        Column("CAUSE", lambda r: r.cause or "-", causes),
    )


def _step(step: str) -> Column[ForcedRequest]:
    header = step.upper().replace("_", "-")
    return number(header, lambda r: span(r.steps[step]) if step in r.steps else None)


def _progress(body: ForcedMiss) -> str:
    looked = f"{body.looked} loads seen, " if body.looked else ""
    text = f"{looked}{body.taken} to miss, {body.recovered} recovered"
    if body.recovery_p50 is not None and body.recovery_p99 is not None:
        text += f" in {span(body.recovery_p50)} (median), {span(body.recovery_p99)} (99th percentile)"
    return text + ("; further loads will be taken" if body.open else "")


VIEWS = (
    View(ForcedMiss, forced_miss_screen, "requests", ForcedRequest),
    View(ClearedOrders, cleared_orders_screen),
)
