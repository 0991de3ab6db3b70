"""Draws the ForcedMiss and ClearedOrders documents."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from kvctl.cli.numbers import clock, span
from kvctl.views.forced_miss import ClearedOrders, ForcedMiss, ForcedRequest
from kvctl.views.table import column_table, pairs_table, state

STEPS = ("forced", "quiesced", "reported", "rescheduled", "first_token")
CHANNELS = {
    "blocks": "what was computed before the load is kept",
    "request": "all that was computed is dropped",
}


def forced_miss_screen(body: ForcedMiss, wide: bool) -> RenderableType:
    """The order, then one request a line: what it would lose, or the seconds after the order of each step."""
    several = "" if body.groups == 1 else f" ({body.groups} KV cache groups)"
    pairs: list[tuple[str, str | Text]] = [
        ("engine", f"{body.engine_id}, {body.mode}, policy {body.policy}"),
        ("misses", body.target),
        ("when", body.when),
        ("channel", f"{body.channel}{several}: {CHANNELS[body.channel]}"),
    ]
    if body.carried_out:
        pairs.insert(0, ("order", f"{body.order_id}{_who(body)}"))
        pairs.append(("so far", _progress(body)))
    if not body.requests:
        return pairs_table(pairs)
    table = _timeline(body, wide) if body.carried_out else _plan(body)
    return Group(pairs_table(pairs), Text(""), table)


def cleared_orders_screen(body: ClearedOrders, _wide: bool) -> RenderableType:
    """One order a line."""
    return column_table(["ORDER", "ENGINE"], [[order_id, body.engine_id] for order_id in body.order_ids])


def _plan(body: ForcedMiss) -> RenderableType:
    headers = ["REQUEST", "FROM", "TOKENS", "KEEPS", "RECOMPUTES", "NOTE"]
    rows = [
        [r.request_id, r.prefiller, str(r.tokens), _count(r.kept), _count(r.recomputed), r.cause or "-"]
        for r in body.requests
    ]
    return column_table(headers, rows, right="TOKENS KEEPS RECOMPUTES")


def _timeline(body: ForcedMiss, wide: bool) -> RenderableType:
    headers = ["REQUEST", "FROM", "STATE", *(step.upper().replace("_", "-") for step in STEPS)]
    headers += ["KEPT", "RECOMPUTED"]
    causes = wide or any(r.state in ("late", "over") for r in body.requests)
    if causes:
        headers.append("CAUSE")
    rows: list[list[str | Text]] = []
    for request in body.requests:
        row: list[str | Text] = [request.request_id, request.prefiller, state(request.state)]
        row += [_step(request, step) for step in STEPS]
        row += [_count(request.kept), _count(request.recomputed)]
        rows.append([*row, request.cause or "-"] if causes else row)
    return column_table(headers, rows, right=" ".join(headers[3:10]))


def _who(body: ForcedMiss) -> str:
    at = f" at {clock(body.asked)}" if body.asked is not None else ""
    return f", by uid {body.uid}, pid {body.pid}{at}"


def _progress(body: ForcedMiss) -> str:
    looked = f"{body.looked} loads seen, " if body.looked else ""
    text = f"{looked}{body.taken} to miss, {body.recovered} recovered"
    if body.recovery_p50 is not None and body.recovery_p99 is not None:
        text += f" in {span(body.recovery_p50)} (median), {span(body.recovery_p99)} (99th percentile)"
    return text + ("; further loads will be taken" if body.open else "")


def _step(request: ForcedRequest, step: str) -> str:
    return span(request.steps[step]) if step in request.steps else "-"


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)
