"""The WholeTransfer document: what `kvctl transfer` prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated

from msgspec import Meta, Struct

from kvctl.cli.numbers import clock, rate, size, span
from kvctl.cli.units import Bytes, Count, Seconds, Time, filled
from kvctl.ledger.statistics import after, before
from kvctl.views.registry import View, moment
from kvctl.views.screen import (
    Cell,
    Column,
    ScreenPart,
    Styled,
    TextTable,
    facts,
    number,
    spaced,
    state,
    table,
)
from kvctl.views.transfers.document import TransferBlocks, TransferDocument, copies, transfer_document
from kvd.wire.transfer import OTHER, LedgerRow, TransferRecord, TransferState


class WholeTransfer(Struct, frozen=True, kw_only=True):
    """One request's transfer: the parts of all workers of the engine that loaded it."""

    request_id: str
    remote_request_id: str
    local_engine: str
    local_generation: str
    remote_engine: str
    remote_generation: str
    mode: str
    state: Annotated[TransferState, Meta(description="a miss on any worker is a miss")]
    cause: str
    code: Annotated[str, Meta(description="the cause in one word (docs/transfers.md)")]
    started: Annotated[Time, Meta(description="when the first worker was given it")]
    seconds: Annotated[Seconds, Meta(description="from the scheduler's claim to the last worker's end")]
    tokens: Count
    bytes: Bytes
    parts: Annotated[tuple[TransferDocument, ...], Meta(description="one for each worker, by rank")]


def whole_transfer(newest: LedgerRow, rows: Iterable[LedgerRow]) -> WholeTransfer:
    """The transfer that ``newest`` is a part of; ``rows`` are all of its request, older attempts among them."""
    record = newest.record
    parts: dict[str, LedgerRow] = {}
    for row in (newest, *sorted(rows, key=lambda row: -row.seq)):
        if _attempt(row.record) == _attempt(record):
            parts.setdefault(row.record.local_rank, row)
    records = [row.record for row in parts.values()]
    missed = next((r for r in records if r.state == "miss"), None)
    began = min(r.started - before(r) for r in records)
    ended = max(r.started + after(r) for r in records)
    return filled(
        WholeTransfer,
        record,
        state="miss" if missed else "done",
        cause=missed.cause if missed else "",
        code=missed.code if missed else "",
        started=moment(min(r.started for r in records)),
        seconds=max(0.0, ended - began),
        bytes=sum(r.bytes for r in records),
        parts=tuple(transfer_document(parts[rank]) for rank in sorted(parts, key=lambda r: (len(r), r))),
    )


def _attempt(record: TransferRecord) -> tuple[str, ...]:
    return (
        record.request_id,
        record.remote_request_id,
        record.local_engine,
        record.local_generation,
        record.remote_generation,
    )


WIDTH, NARROWEST = 60, 10
"""Columns of the axis where there is room for it, and those that it keeps."""
STYLES = {
    "queued": "dim",
    "handshake": "magenta",
    "plan": "cyan",
    "post": "yellow",
    "wire": "green",
    "claim": "dim",
    "announce": "magenta",
    "wait": "dim",
}
BEGINS = {"queued": "queued", "post": "posting", "wire": "posted", "announce": "announced", "wait": "taken"}
"""For each stage the moment at which it begins, where the worker wrote one down."""
ENDS = {"handshake": "handshake", "plan": "planned"}
"""The same for stages of which the end is known."""


def whole_transfer_screen(body: WholeTransfer, wide: bool) -> ScreenPart:
    """The facts, the timeline, each worker's figures; with ``wide`` its blocks."""
    generations = (body.remote_generation, body.local_generation)
    remote, local = (f"generation {g}" if g else "generation unknown" for g in generations)
    rows: list[tuple[str, Cell]] = [
        ("request", body.request_id),
        ("from", f"{body.remote_engine}, {remote}, request {body.remote_request_id or 'unknown'}"),
        ("to", f"{body.local_engine}, {local}"),
        ("state", state(body.state)),
        *([("cause", f"{body.code}: {body.cause}" if body.code else body.cause)] if body.cause else []),
        ("started", clock(body.started)),
        ("time", span(body.seconds)),
        ("moved", f"{size(body.bytes)}, {body.tokens} tokens, {body.mode}"),
    ]
    parts: list[ScreenPart] = [facts(*rows), partial(timeline, body.parts), _figures(body.parts)]
    parts += [_checksums(body.parts)] if any(part.checksum.state for part in body.parts) else []
    return spaced([*parts, _blocks(body.parts)] if wide else parts)


def timeline(parts: tuple[TransferDocument, ...], room: int) -> ScreenPart:
    """Each stage of each worker as a bar, from the first one's begin to the last one's end, in ``room`` columns."""
    bars = [
        (part.local_rank, name, part.started.timestamp() + begin, seconds)
        for part in parts
        for name, begin, seconds in placed(part)
    ]
    if not bars:
        return "no stage of it took any time"
    zero = min(begin for _, _, begin, _ in bars)
    whole = max(begin + seconds for _, _, begin, seconds in bars) - zero
    ranks = max(len(rank) for rank, *_ in bars)
    names = max(len(name) for _, name, *_ in bars)
    beside = ranks + names + len("    ||  ") + max(len(span(seconds)) for *_, seconds in bars)
    axis = max(NARROWEST, min(WIDTH, room - beside))
    lines: list[ScreenPart] = []
    last = ""
    for rank, name, begin, seconds in bars:
        first = min(axis - 1, int((begin - zero) / whole * axis)) if whole else 0
        length = max(1, min(axis - first, round(seconds / whole * axis))) if whole else 1
        lines.append(
            (
                f"{'' if rank == last else rank:<{ranks}}  {name:<{names}}  |" + " " * first,
                Styled("#" * length, STYLES.get(name, "")),
                f"{' ' * (axis - first - length)}|  {span(seconds)}",
            )
        )
        last = rank
    return [*lines, f"{'':<{ranks + names + 4}}0{span(whole):>{axis}}"]


def placed(part: TransferDocument) -> Iterator[tuple[str, float, float]]:
    """The stages that took any time: name, begin in seconds after ``started``, length; placed by what is known."""
    # A handshake that the scheduler waited for comes before the claim, and so before the queue.
    stages = part.stages
    cursor = -stages.get("queued", 0.0)
    if part.moments and "handshake" in stages and "handshake" not in part.moments:
        stages = {"handshake": stages["handshake"]} | stages
        cursor -= stages["handshake"]
    begins = BEGINS | {"wire": "first"} if part.mode == "push" else BEGINS
    for name, seconds in stages.items():
        if seconds <= 0 or name == OTHER:  # what lies between the bars
            continue
        begin = cursor
        if (mark := part.moments.get(begins.get(name, ""))) is not None:
            begin = mark
        elif (mark := part.moments.get(ENDS.get(name, ""))) is not None:
            begin = mark - seconds
        yield name, begin, seconds
        cursor = begin + seconds


def _figures(parts: tuple[TransferDocument, ...]) -> ScreenPart:
    return table(
        parts,
        Column("RANK", lambda part: part.local_rank),
        Column("READS", lambda part: " ".join(part.remote_ranks) or "-"),
        Column("STATE", lambda part: state(part.state)),
        Column("BACKEND", lambda part: part.backend),
        number("BYTES", lambda part: size(part.bytes)),
        number("RATE", lambda part: rate(part.bytes_per_second)),
        number("COPIES", copies),
        Column(
            "BLOCKS", lambda part: " ".join(f"g{share.group}:{share.blocks}" for share in part.groups) or "-"
        ),
        number("TRIES", lambda part: part.attempts),
        Column("CAUSE", lambda part: part.cause or "-"),
    )


def _checksums(parts: tuple[TransferDocument, ...]) -> ScreenPart:
    """What was compared with the prefiller's sums, group by group, or why nothing was."""
    rows: list[list[Cell]] = []
    for part in parts:
        found = part.checksum
        time = span(found.seconds)
        for group in found.groups:
            what = "differs" if group.differs else "ok"
            layers = str(group.layers)
            rows.append([part.local_rank, what, f"g{group.group}", layers, time, group.differs or "-"])
        if found.state and not found.groups:
            rows.append([part.local_rank, found.state, "-", "-", time, found.why or "-"])
    return TextTable(["RANK", "CHECKSUM", "GROUP", "LAYERS", "TIME", "WHAT"], rows, ["LAYERS", "TIME"])


def _blocks(parts: tuple[TransferDocument, ...]) -> ScreenPart:
    rows = [
        [part.local_rank, side, f"g{blocks.group}", str(blocks.first), _runs(blocks)]
        for part in parts
        for side, lists in (("local", part.local_blocks), ("remote", part.remote_blocks))
        for blocks in lists
    ]
    return TextTable(["RANK", "SIDE", "GROUP", "FIRST", "IDS"], rows, ["FIRST"])


def _runs(blocks: TransferBlocks) -> str:
    return " ".join(
        str(start) if count == 1 else f"{start}-{start + count - 1}" for start, count in blocks.runs
    )


VIEWS = (View(WholeTransfer, whole_transfer_screen),)
