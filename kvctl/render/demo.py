"""Draws the Demo document: the topology, then one request a line and the totals."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from kvctl.cli.numbers import rate, size, span
from kvctl.render.topology import topology_screen
from kvctl.views.demo import Demo, DemoRequest
from kvctl.views.table import column_table

NUMBERS = "PROMPT REMOTE NEW BYTES HANDSHAKE TRANSFER RATE COPIES"


def demo_screen(body: Demo, wide: bool) -> RenderableType:
    """What moved from where to where, request by request."""
    compared = "INTACT" if body.simulated else "EQUAL"
    headers = ["REQUEST", "PROMPT", "REMOTE", *([] if body.simulated else ["NEW"])]
    headers += ["BYTES", "HANDSHAKE", "TRANSFER", "RATE", *(["COPIES", "SOURCES"] if wide else []), compared]
    rows = [_row(request, body, wide=wide) for request in body.requests]
    parts: list[RenderableType] = [topology_screen(body.topology, wide), ""] if body.topology.pairs else []
    parts += [column_table(headers, rows, right=NUMBERS), "", _verdict(body)]
    parts += [
        Text(f"{request.request}: {request.problem}", "red") for request in body.requests if request.problem
    ]
    return Group(*parts)


def _row(request: DemoRequest, body: Demo, *, wide: bool) -> list[str | Text]:
    seconds = request.transfer_seconds
    # What is pushed comes as it is computed: how long that took says nothing of how fast the bytes went.
    rated = seconds > 0 and body.mode == "pull"
    row: list[str | Text] = [request.request, str(request.prompt_tokens), str(request.external_tokens)]
    if not body.simulated:
        row.append(str(request.output_tokens))
    row += [
        size(request.bytes),
        span(request.handshake_seconds) if request.handshake_seconds else "known",
        span(seconds),
        rate(request.bytes / seconds if rated else None),
    ]
    if wide:
        row += [str(request.copies) if body.mode == "pull" else "-", ", ".join(request.remote_ranks) or "-"]
    row.append(Text("yes", "green") if request.equal else Text("NO", "bold red"))
    return row


def _verdict(body: Demo) -> Text:
    count, good = len(body.requests), sum(request.equal and not request.problem for request in body.requests)
    came = sum(request.external_tokens for request in body.requests)
    asked = sum(request.prompt_tokens for request in body.requests)
    right = "every byte is as it must be" if body.simulated else "every output is the single engine's"
    text = Text.assemble((f"{good} of {count} requests came out right", "green" if body.ok else "bold red"))
    text.append(f": {right}. " if body.ok else ". ")
    way = f"{body.leases_released} leases released" if body.mode == "pull" else "pushed layer by layer"
    text.append(
        f"{size(body.bytes)} moved for {came} of {asked} prompt tokens, {way}, {span(body.seconds)} in all."
    )
    return text
