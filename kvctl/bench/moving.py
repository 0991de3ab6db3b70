"""Moves requests and notes how long each stage of each took. Reads are loads of `kvd.worker`: what runs is measured."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvctl.bench.cases import MovedRequest
from kvd.backends.contract import Backend, Lane, State, Transfer
from kvd.topology.compile import compile_plan
from kvd.topology.copies import Copies
from kvd.topology.descriptors import Descriptors, concatenate
from kvd.topology.pairing import PairedBlocks, pair_blocks
from kvd.topology.plan import Plan
from kvd.topology.transfer_topology import TransferTopology
from kvd.worker.cause import text_of
from kvd.worker.load import Load, LoadPiece, LoadPieces, load_of
from kvd.worker.orders import LoadOrder, plain
from kvd.worker.pull.looks import FAST_FOR, POLL_FAST, POLL_SLOW
from kvd.worker.pull.reader import PullThread
from kvd.worker.remote import RemotePrefill

STAGES = ("plan", "prepare", "post", "wire", "complete")
SOURCE = "read"
"""What the reader calls the engine that it reads from, and with it the lane."""
CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Moved:
    """One request that is over: when it began and ended (monotonic seconds), seconds of each stage, what was moved."""

    number: int
    began: float
    ended: float
    stages: dict[str, float]
    bytes: int
    descriptors: int


def move(
    mover: LoadMover | WriteMover,
    requests: Sequence[MovedRequest],
    seconds: float,
    *,
    at: Sequence[float] | None = None,
    in_flight: int = 0,
    coalesce: bool = True,
) -> dict[str, Any]:
    """Move the requests: all at once, each at its second of ``at``, or ``in_flight`` at a time.

    Gives the seconds in all, and for each request its stages in seconds, how late it began, bytes and descriptors.
    Raises `TimeoutError` and `RuntimeError` where bytes do not arrive; the mover is then good for nothing.
    """
    waiting = list(range(len(requests)))[::-1]
    done: list[Moved] = []
    began = time.monotonic()
    due = [began + (at[number] if at else 0.0) for number in range(len(requests))]
    until = max(due, default=began) + seconds
    while len(done) < len(requests):
        under_way = len(requests) - len(waiting) - len(done)
        room = bool(waiting) and (not in_flight or under_way < in_flight)
        if room and time.monotonic() >= due[waiting[-1]]:
            number = waiting.pop()
            mover.begin(number, requests[number], seconds=seconds, coalesce=coalesce)
            done += mover.over(0.0)
            continue
        next_look = due[waiting[-1]] if room else until
        done += mover.over(max(0.0, next_look - time.monotonic()))
        if time.monotonic() > until and len(done) < len(requests):
            left = len(requests) - len(done)
            raise TimeoutError(f"{left} of {len(requests)} requests are not done in time")
    done.sort(key=lambda one: one.number)
    return {
        "seconds": max((one.ended for one in done), default=began) - began,
        "requests": [
            {
                "stages": one.stages,
                "seconds": one.ended - one.began,
                "late": max(0.0, one.began - due[one.number]) if at else 0.0,
                "bytes": one.bytes,
                "descriptors": one.descriptors,
            }
            for one in done
        ],
    }


class LoadMover:
    """Reads as a decoding worker does: by its thread for the peer engine (`kvd.worker.pull.reader`)."""

    def __init__(self, backend: Backend, topology: TransferTopology) -> None:
        """The source is registered in ``topology`` under the name `SOURCE`."""
        source = topology.remote(SOURCE)
        self._plan, self._generation = source.plan, source.generation
        self._ended: queue.Queue[Load] = queue.Queue()
        self._lane = PullThread(SOURCE, backend, topology, self._ended.put)
        self._lane.on_peer_changed()

    def begin(self, number: int, request: MovedRequest, *, seconds: float, coalesce: bool) -> None:
        """Begin a request. Without ``coalesce`` every block and run of bytes is a descriptor of its own."""
        now = time.monotonic()
        load = load_of(self._order(number, request, seconds, now), now)
        if not coalesce:
            copies = uncoalesced(self._plan, request)
            cut = [LoadPiece(0, request.tokens, copies)]
            load.pieces = LoadPieces(self._plan, request.reader, request.source, cut)
            load.times.planned = time.monotonic()
            load.times.planning_seconds = load.times.planned - now
        self._lane.begin(load)

    def over(self, seconds: float) -> list[Moved]:
        """Requests that ended since it was last asked; waits at most so long for one. Raises `RuntimeError`."""
        found: list[Moved] = []
        try:
            while True:
                found.append(_moved(self._ended.get(timeout=0.0 if found else seconds)))
        except queue.Empty:
            return found

    def close(self) -> None:
        """End the thread, which gives up what is under way."""
        self._lane.stop()
        self._lane.join(CLOSE_SECONDS)

    def _order(self, number: int, request: MovedRequest, seconds: float, now: float) -> LoadOrder:
        sides = [request.source.get(group) for group in range(max(request.source) + 1)]
        prefill = RemotePrefill(
            engine_id=SOURCE,
            request_id=request.name,
            generation=self._generation,
            host="",
            port=0,
            tokens=request.tokens,
            blocks=tuple(tuple(of.ids.tolist()) if of else () for of in sides),
            first_blocks=tuple(of.first if of else 0 for of in sides),
            lease_seconds=seconds,
            lease_opened=0.0,
        )
        return LoadOrder(
            request_id=str(number),
            prefill=prefill,
            groups=plain(request.reader),
            tokens=request.tokens,
            seconds=seconds,
            claimed=now,
        )


def _moved(load: Load) -> Moved:
    if load.cause is not None:
        raise RuntimeError(f"request {load.order.request_id}: {text_of(load.cause)}")
    times, copies = load.times, load.pieces.copies
    began = times.planned - times.planning_seconds
    spent = {"plan": times.posting - began, "prepare": times.preparing_seconds}
    spent["post"] = times.posted - times.posting - times.preparing_seconds
    stages = spent | _after(load.pieces.transfers, times.posted, times.ended)
    return Moved(
        int(load.order.request_id),
        began,
        times.ended,
        stages,
        sum(part.nbytes for part in copies),
        sum(part.runs for part in copies),
    )


def _after(transfers: Sequence[Transfer], posted: float, ended: float) -> dict[str, float]:
    """The stages after the post: it is over when the backend saw it; the rest is until we did."""
    over = max((transfer.ended for transfer in transfers if transfer.ended), default=ended)
    over = min(max(over, posted), ended)
    return {"wire": over - posted, "complete": ended - over}


@dataclass(slots=True)
class _Write:
    """One request that is being written."""

    number: int
    began: float
    posted: float
    stages: dict[str, float]
    transfers: list[tuple[Lane, Transfer]]
    copies: Sequence[Copies]


@dataclass(slots=True)
class WriteMover:
    """Writes each request in one go; ``lanes`` are by position of the source worker, each to the reader's window."""

    plan: Plan
    lanes: Mapping[int, Lane]
    under_way: list[_Write] = field(default_factory=list)

    def begin(self, number: int, request: MovedRequest, *, seconds: float, coalesce: bool) -> None:
        """See `LoadMover`."""
        del seconds
        began = time.monotonic()
        if coalesce:
            rows = compile_plan(self.plan, request.reader, request.source, tokens=request.tokens)
            copies = {position: Copies(part) for position, part in rows.items()}
        else:
            copies = uncoalesced(self.plan, request)
        stages = {"plan": time.monotonic() - began, "prepare": 0.0, "post": 0.0}
        transfers = []
        for position, part in copies.items():
            # The plan is the reader's; whoever writes sees its two sides the other way round.
            rows_there = part.descriptors
            turned = Descriptors(rows_there.remote, rows_there.local, rows_there.length)
            begun = time.monotonic()
            transfer = self.lanes[position].submit("reader", turned, "write")
            ended = time.monotonic()
            # An adapter notes when it had prepared; one that prepares nothing begins with the post.
            prepared = min(max(transfer.posted, begun), ended)
            stages["prepare"] += prepared - begun
            stages["post"] += ended - prepared
            transfers.append((self.lanes[position], transfer))
        write = _Write(number, began, time.monotonic(), stages, transfers, list(copies.values()))
        self.under_way.append(write)

    def over(self, seconds: float) -> list[Moved]:
        """See `LoadMover`; looks again after a short while."""
        found, left = [], []
        for write in self.under_way:
            states = [
                transfer.state if transfer.state is not State.PENDING else lane.poll(transfer)
                for lane, transfer in write.transfers
            ]
            if State.FAILED in states:
                reason = write.transfers[states.index(State.FAILED)][1].reason
                raise RuntimeError(f"request {write.number}: {reason}")
            if State.PENDING in states:
                left.append(write)
                continue
            ended = time.monotonic()
            stages = write.stages | _after([transfer for _, transfer in write.transfers], write.posted, ended)
            size, runs = sum(part.nbytes for part in write.copies), sum(part.runs for part in write.copies)
            found.append(Moved(write.number, write.began, ended, stages, size, runs))
        self.under_way = left
        if seconds and not found:
            pause(left[-1].posted if left else time.monotonic())
        return found


def pause(posted: float) -> None:
    """Wait before the next look at a transfer that was posted then, on the monotonic clock."""
    time.sleep(POLL_FAST if time.monotonic() - posted < FAST_FOR else POLL_SLOW)


def uncoalesced(plan: Plan, request: MovedRequest) -> dict[int, Copies]:
    """Every block and run of bytes of the plan as a descriptor of its own, by position of the source worker."""
    found: dict[int, list[Descriptors]] = {}
    for paired in pair_blocks(plan, request.reader, request.source, request.tokens):
        found.setdefault(paired.read.remote, []).append(_each(paired))
    return {position: Copies(concatenate(parts)) for position, parts in found.items()}


def _each(paired: PairedBlocks) -> Descriptors:
    read, rows = paired.read, paired.read.rows
    return Descriptors(
        (rows.local[:, None] + paired.mine * read.local_stride).ravel(),
        (rows.remote[:, None] + paired.theirs * read.remote_stride).ravel(),
        rows.length.repeat(len(paired.mine)),
    )
