"""Draws the WholeTransfer document: what it was, and each worker's stages on one axis of time."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from kvctl.cli.numbers import clock, rate, size, span
from kvctl.views.table import column_table, pairs_table, state
from kvctl.views.transfers.document import Blocks, Transfer
from kvctl.views.transfers.whole import WholeTransfer

WIDTH = 60
"""Columns of the axis."""
STYLES = {
    "queued": "dim",
    "handshake": "magenta",
    "plan": "cyan",
    "post": "yellow",
    "wire": "green",
    "announce": "magenta",
    "wait": "dim",
}
BEGINS = {"queued": "queued", "post": "posting", "wire": "posted", "announce": "announced", "wait": "taken"}
"""For each stage the moment at which it begins, where the worker wrote one down."""
ENDS = {"handshake": "handshake", "plan": "planned"}
"""The same for stages of which the end is known."""


def whole_transfer_screen(body: WholeTransfer, wide: bool) -> RenderableType:
    """The facts, the timeline, each worker's figures; with ``wide`` its blocks."""
    generation = [f"generation {g}" if g else "generation unknown" for g in _generations(body)]
    facts: list[tuple[str, str | Text]] = [
        ("request", body.request_id),
        ("from", f"{body.remote_engine}, {generation[0]}, request {body.remote_request_id or 'unknown'}"),
        ("to", f"{body.local_engine}, {generation[1]}"),
        ("state", state(body.state)),
        *([("cause", f"{body.code}: {body.cause}" if body.code else body.cause)] if body.cause else []),
        ("started", clock(body.started)),
        ("time", span(body.seconds)),
        ("moved", f"{size(body.bytes)}, {body.tokens} tokens, {body.mode}"),
    ]
    return Group(
        pairs_table(facts),
        Text(""),
        *timeline(body.parts),
        Text(""),
        _figures(body.parts),
        *([Text(""), _checksums(body.parts)] if any(part.checksum.state for part in body.parts) else []),
        *(([Text(""), _blocks(body.parts)]) if wide else []),
    )


def timeline(parts: tuple[Transfer, ...]) -> Iterator[Text]:
    """Each stage of each worker as a bar, from the first one's begin to the last one's end."""
    bars = [
        (part.local_rank, name, part.started.timestamp() + begin, seconds)
        for part in parts
        for name, begin, seconds in placed(part)
    ]
    if not bars:
        yield Text("no stage of it took any time")
        return
    zero = min(begin for _, _, begin, _ in bars)
    whole = max(begin + seconds for _, _, begin, seconds in bars) - zero
    ranks = max(len(rank) for rank, *_ in bars)
    names = max(len(name) for _, name, *_ in bars)
    last = ""
    for rank, name, begin, seconds in bars:
        first = min(WIDTH - 1, int((begin - zero) / whole * WIDTH)) if whole else 0
        length = max(1, min(WIDTH - first, round(seconds / whole * WIDTH))) if whole else 1
        line = Text(f"{'' if rank == last else rank:<{ranks}}  {name:<{names}}  |")
        line.append(" " * first)
        line.append("#" * length, style=STYLES.get(name, ""))
        line.append(f"{' ' * (WIDTH - first - length)}|  {span(seconds)}")
        last = rank
        yield line
    yield Text(f"{'':<{ranks + names + 4}}0{span(whole):>{WIDTH}}")


def placed(part: Transfer) -> Iterator[tuple[str, float, float]]:
    """The stages that took any time: name, begin in seconds after ``started``, length; placed by what is known."""
    cursor = -part.stages.get("queued", 0.0)
    if "handshake" not in part.moments and part.moments:
        cursor -= part.stages.get(
            "handshake", 0.0
        )  # before the claim, while the request waited in the scheduler
    order = sorted(part.stages.items(), key=lambda stage: _early(part, stage[0]))
    for name, seconds in order:
        if seconds <= 0:
            continue
        begin = cursor
        if (mark := part.moments.get(_begin_name(part, name))) is not None:
            begin = mark
        elif (mark := part.moments.get(ENDS.get(name, ""))) is not None:
            begin = mark - seconds
        yield name, begin, seconds
        cursor = begin + seconds


def _early(part: Transfer, name: str) -> int:
    """A handshake that the scheduler waited for comes before the claim, and so before the queue."""
    return 0 if name == "handshake" and part.moments and "handshake" not in part.moments else 1


def _begin_name(part: Transfer, name: str) -> str:
    return "first" if part.mode == "push" and name == "wire" else BEGINS.get(name, "")


def _generations(body: WholeTransfer) -> tuple[str, str]:
    return body.remote_generation, body.local_generation


def _figures(parts: tuple[Transfer, ...]) -> RenderableType:
    headers = ["RANK", "READS", "STATE", "BACKEND", "BYTES", "RATE", "COPIES", "BLOCKS", "TRIES", "CAUSE"]
    rows: list[list[str | Text]] = [
        [
            part.local_rank,
            " ".join(part.remote_ranks) or "-",
            state(part.state),
            part.backend,
            size(part.bytes),
            rate(part.bytes_per_second),
            f"{part.coalesced_descriptors or '-'}/{part.descriptors}",
            " ".join(f"g{share.group}:{share.blocks}" for share in part.groups) or "-",
            str(part.attempts),
            part.cause or "-",
        ]
        for part in parts
    ]
    return column_table(headers, rows, right="BYTES RATE COPIES TRIES")


def _checksums(parts: tuple[Transfer, ...]) -> RenderableType:
    """What was compared with the prefiller's sums, group by group, or why nothing was."""
    rows: list[list[str | Text]] = []
    for part in parts:
        found = part.checksum
        time = span(found.seconds)
        for group in found.groups:
            what = "differs" if group.differs else "ok"
            layers = str(group.layers)
            rows.append([part.local_rank, what, f"g{group.group}", layers, time, group.differs or "-"])
        if found.state and not found.groups:
            rows.append([part.local_rank, found.state, "-", "-", time, found.why or "-"])
    return column_table(["RANK", "CHECKSUM", "GROUP", "LAYERS", "TIME", "WHAT"], rows, right="LAYERS TIME")


def _blocks(parts: tuple[Transfer, ...]) -> RenderableType:
    rows = [
        [part.local_rank, side, f"g{blocks.group}", str(blocks.first), _runs(blocks)]
        for part in parts
        for side, lists in (("local", part.local_blocks), ("remote", part.remote_blocks))
        for blocks in lists
    ]
    return column_table(["RANK", "SIDE", "GROUP", "FIRST", "IDS"], rows, right="FIRST")


def _runs(blocks: Blocks) -> str:
    return " ".join(
        str(start) if count == 1 else f"{start}-{start + count - 1}" for start, count in blocks.runs
    )
