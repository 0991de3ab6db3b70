"""Moves requests the way the connector does, and notes how long each stage of each took."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvctl.bench.cases import Request
from kvd.backends.contract import Lane, Operation, State, Transfer, takes_selections
from kvd.topology.compile import compile_plan
from kvd.topology.copies import Copies, compile_request
from kvd.topology.descriptors import Descriptors, concatenate
from kvd.topology.grid import Selection
from kvd.topology.pairing import Met, meetings
from kvd.topology.plan import Plan

POLL_FAST, POLL_SLOW, FAST_FOR = 50e-6, 1e-3, 0.02
"""Seconds between looks, as the connector's: spinning would starve the transport."""
STAGES = ("plan", "prepare", "post", "wire", "complete")


@dataclass(frozen=True)
class Move:
    """How to move: ``lanes`` are ``read``, or ``write-N`` for each source worker N.

    Without ``coalesce`` every block and run of bytes is a descriptor of its own. ``selection``: scattered blocks
    that are read go by number, where the connector does so. ``seconds`` is the time limit.
    """

    plan: Plan
    lanes: Mapping[str, Lane]
    operation: Operation
    coalesce: bool
    selection: bool
    seconds: float


@dataclass(slots=True)
class _Going:
    """One request on its way; times are of the monotonic clock. ``parts`` are counted as ``copies`` once it is over."""

    number: int
    started: float
    stages: dict[str, float]
    transfers: list[tuple[Lane, Transfer]]
    posted: float
    bytes: int
    parts: tuple[Copies, ...]
    copies: int = 0
    ended: float = 0.0


def move(
    way: Move, requests: Sequence[Request], at: Sequence[float] | None = None, in_flight: int = 0
) -> dict[str, Any]:
    """Move the requests: all at once, each at its second of ``at``, or ``in_flight`` at a time.

    Gives the seconds in all, and for each request its stages in seconds, how late it began, bytes and descriptors.
    Raises `TimeoutError` and `RuntimeError` where bytes do not arrive; the lanes are then good for nothing but `close`.
    """
    waiting = list(range(len(requests)))[::-1]
    going: list[_Going] = []
    done: list[_Going] = []
    began = time.monotonic()
    late = [0.0] * len(requests)
    until = began + way.seconds + (max(at) if at else 0.0)
    while waiting or going:
        while waiting and _due(waiting[-1], at, began) and (not in_flight or len(going) < in_flight):
            number = waiting.pop()
            late[number] = time.monotonic() - began - at[number] if at else 0.0
            going.append(_post(way, number, requests[number]))
            going = _look(going, done)
        going = _look(going, done)
        if time.monotonic() > until:
            raise TimeoutError(
                f"{len(going) + len(waiting)} of {len(requests)} requests are not done in time"
            )
        if waiting or going:
            pause(going[-1].posted if going else time.monotonic())
    seconds = max((one.ended for one in done), default=began) - began
    done.sort(key=lambda one: one.number)
    return {
        "seconds": seconds,
        "requests": [
            {
                "stages": one.stages,
                "seconds": one.ended - one.started,
                "late": late[one.number],
                "bytes": one.bytes,
                "descriptors": one.copies,
            }
            for one in done
        ],
    }


def pause(posted: float) -> None:
    """Wait before the next look at a transfer that was posted then, on the monotonic clock."""
    time.sleep(POLL_FAST if time.monotonic() - posted < FAST_FOR else POLL_SLOW)


def _due(number: int, at: Sequence[float] | None, began: float) -> bool:
    return at is None or time.monotonic() - began >= at[number]


def _post(way: Move, number: int, request: Request) -> _Going:
    started = time.monotonic()
    if not way.coalesce:
        copies = uncoalesced(way.plan, request)
    elif way.selection:
        copies = compile_request(way.plan, request.reader, request.source, tokens=request.tokens)
    else:
        rows = compile_plan(way.plan, request.reader, request.source, tokens=request.tokens)
        copies = {position: Copies(part) for position, part in rows.items()}
    planned = time.monotonic()
    going = _Going(number, started, {"plan": planned - started}, [], 0.0, 0, tuple(copies.values()))
    preparing = posting = 0.0
    for position, part in copies.items():
        lane, peer = _way(way, position)
        for what in (part.descriptors, part.selection):
            if what is None or not len(what):
                continue
            begun = time.monotonic()
            transfer = _submit(lane, peer, what, way.operation)
            ended = time.monotonic()
            # An adapter notes when it had prepared; one that prepares nothing begins with the post.
            prepared = min(max(transfer.posted, begun), ended)
            preparing, posting = preparing + prepared - begun, posting + ended - prepared
            going.transfers.append((lane, transfer))
        going.bytes += part.nbytes
    going.posted = time.monotonic()
    going.stages |= {"prepare": preparing, "post": posting}
    return going


def _way(way: Move, position: int) -> tuple[Lane, str]:
    if way.operation == "read":
        return way.lanes["read"], str(way.plan.remote_ranks[position])
    return way.lanes[f"write-{position}"], "reader"


def _submit(lane: Lane, peer: str, what: Descriptors | Selection, operation: Operation) -> Transfer:
    if isinstance(what, Selection):
        if takes_selections(lane):
            return lane.submit_selection(peer, what, operation)
        what = what.descriptors()
    # The plan is the reader's; whoever writes sees its two sides the other way round.
    rows = what if operation == "read" else Descriptors(what.remote, what.local, what.length)
    return lane.submit(peer, rows, operation)


def _look(going: list[_Going], done: list[_Going]) -> list[_Going]:
    """Poll each once; those that are over go to ``done``. Raises `RuntimeError` for one that failed."""
    left = []
    for one in going:
        begun = time.monotonic()
        for lane, transfer in one.transfers:
            state = transfer.state if transfer.state is not State.PENDING else lane.poll(transfer)
            if state is State.FAILED:
                raise RuntimeError(f"request {one.number}: {transfer.reason}")
        if any(transfer.state is State.PENDING for _, transfer in one.transfers):
            left.append(one)
            continue
        one.ended = time.monotonic()
        # Over when the backend saw it; the rest is until we did.
        over = max((t.ended for _, t in one.transfers if t.ended), default=begun)
        over = min(max(over, one.posted), one.ended)
        one.stages |= {"wire": over - one.posted, "complete": one.ended - over}
        one.copies, one.parts = sum(part.runs for part in one.parts), ()
        done.append(one)
    return left


def uncoalesced(plan: Plan, request: Request) -> dict[int, Copies]:
    """Every block and run of bytes of the plan as a descriptor of its own, by position of the source worker."""
    found: dict[int, list[Descriptors]] = {}
    for met in meetings(plan, request.reader, request.source, request.tokens):
        found.setdefault(met.read.remote, []).append(_each(met))
    return {position: Copies(concatenate(parts)) for position, parts in found.items()}


def _each(met: Met) -> Descriptors:
    read, rows = met.read, met.read.rows
    return Descriptors(
        (rows.local[:, None] + met.mine * read.local_stride).ravel(),
        (rows.remote[:, None] + met.theirs * read.remote_stride).ravel(),
        rows.length.repeat(len(met.mine)),
    )
