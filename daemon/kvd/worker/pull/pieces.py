"""How a load is read: cut into pieces, compiled, posted on a lane and polled; what a forced miss leaves out of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvd.backends.contract import Lane, State, Traits
from kvd.geometry.model import WorkerGeometry
from kvd.topology.compile import compile_plan
from kvd.topology.copies import Copies, check_given, compile_blocks, compile_request, straight_copies
from kvd.topology.descriptors import Descriptors, concatenate
from kvd.topology.pieces import cut
from kvd.topology.pieces import piece as blocks_of
from kvd.topology.plan import Plan, plan_layers
from kvd.worker.load import Load, LoadPiece, state_of, submitted
from kvd.worker.orders import Fault, block_lists

TELLING = 8 << 20
"""Bytes of a load from which its time on the device says what others take."""


def apply_plan(load: Load, plan: Plan, traits: Traits, *, piece_bytes: int) -> None:
    """Cut the load into pieces and compile the first one; `post` compiles the others.

    There is a piece for every ``piece_bytes``, or for so many more as make one worth while to the backend (`cut`).
    Raises `TopologyError` where the blocks of the first piece do not fit.
    """
    began = time.monotonic()
    order, pieces, times, prefill = load.order, load.pieces, load.times, load.order.prefill
    least = max(piece_bytes, traits.least_piece)
    copies = None
    if traits.block_lists:
        theirs = (prefill.first_blocks, prefill.blocks)
        copies = straight_copies(plan, order.groups, theirs, tokens=order.tokens, most_bytes=2 * least)
    if copies is not None:
        # With no local blocks noted nothing is left over, and so it is.
        pieces.all = [LoadPiece(0, order.tokens, copies)]
        pieces.plan = plan
        times.planned = time.monotonic()
        times.planning_seconds = times.planned - began
        return
    pieces.local, pieces.remote = block_lists(order.groups), prefill.block_lists()
    ends = cut(plan, pieces.local, tokens=order.tokens, least=least)
    pieces.all = [LoadPiece(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]
    _compiled(load, pieces.all[0], plan, traits)
    pieces.plan = plan
    times.planned = time.monotonic()
    times.planning_seconds = times.planned - began


def post(load: Load, lane: Lane, traits: Traits) -> None:
    """Submit all transfers of a planned load on a lane, piece after piece; pieces that have come already have none.

    A piece that was not compiled before is now, while the bytes of those before it move.

    Raises `BackendError`, and `TopologyError` where the blocks of a piece do not fit, or are given twice. That is found
    last. What was posted before stands in the pieces' ``transfers``.
    """
    load.times.posting = time.monotonic()
    plan = load.pieces.plan
    if plan is None:
        raise RuntimeError(f"the load of {load.order.request_id} is not planned and cannot be posted")
    for piece in load.pieces.left:
        for index, copies in _compiled(load, piece, plan, traits).items():
            begun = time.monotonic()
            for transfer in submitted(lane, str(plan.remote_ranks[index]), copies):
                piece.transfers.append(transfer)
                load.times.preparing_seconds += max(0.0, transfer.posted - begun)
                begun = time.monotonic()
    load.times.posted = time.monotonic()
    load.under_way.set()
    for copies in load.pieces.copies:
        check_given(copies)


def _compiled(load: Load, piece: LoadPiece, plan: Plan, traits: Traits) -> dict[int, Copies]:
    """What a piece copies, with a selection where the backend is good at it; kept, so a new lane costs no plan."""
    if piece.copies is None:
        tokens, blocks, remote = load.order.tokens, load.pieces.local, load.pieces.remote
        if len(load.pieces.all) > 1:
            blocks = blocks_of(plan, blocks, begin=piece.begin, end=piece.end, tokens=tokens)
        if traits.block_lists:
            piece.copies = compile_blocks(plan, blocks, remote, tokens=tokens)
        elif traits.strided_lists:
            piece.copies = compile_request(plan, blocks, remote, tokens=tokens)
        else:
            found = compile_plan(plan, blocks, remote, tokens=tokens)
            piece.copies = {index: Copies(descriptors) for index, descriptors in found.items()}
    return piece.copies


def look(load: Load, lane: Lane) -> tuple[State, str]:
    """Poll all transfers: FAILED with a reason as soon as one failed, DONE when all are.

    Counts the pieces that came. What comes after the deadline may not be used: its lease may have ended.
    """
    waiting, failed = False, ""
    for piece in load.pieces.left:
        for transfer in piece.transfers:
            state = state_of(transfer, lane)
            if state is State.FAILED:
                failed = failed or f"{transfer.peer}: {transfer.reason}"
            waiting = waiting or state is State.PENDING
        if failed:
            return State.FAILED, failed
        if not waiting and time.monotonic() <= load.deadline:
            load.pieces.done += 1
    return (State.PENDING if waiting else State.DONE), ""


def pace(load: Load) -> float:
    """Seconds for a token that a load took on the device, 0 where no lane told or it was too short to tell."""
    transfers, order = load.pieces.transfers, load.order
    seconds = sum(transfer.detail.get("device_seconds", 0.0) for transfer in transfers)
    told = sum(transfer.bytes for transfer in transfers) > TELLING
    return seconds / (order.tokens - order.computed) if told and order.tokens > order.computed else 0.0


def hold_back(
    load: Load,
    fault: Fault,
    local: WorkerGeometry,
    siblings: Sequence[WorkerGeometry],
    remotes: Sequence[WorkerGeometry],
) -> None:
    """Leave out of a planned load what is not to arrive: the named layers, else the second half of its pieces.

    Of a single piece it is the second half of the copies: the first piece of a planned load is compiled.
    An empty piece at the end stands for what is missing, so that the load is never whole.

    Raises `TopologyError` where the blocks do not fit.
    """
    missing, order, pieces = fault.withheld(local), load.order, load.pieces
    if not missing and len(pieces.all) > 1:
        kept = pieces.all[: len(pieces.all) // 2]
        pieces.all = [*kept, LoadPiece(kept[-1].end, order.tokens, {})]
        return
    rest = LoadPiece(order.computed, order.tokens, {})
    if not missing:
        halves = {
            source: Copies(_first_half(copies)) for source, copies in (pieces.all[0].copies or {}).items()
        }
        pieces.all = [LoadPiece(0, order.computed, halves), rest]
        return
    blocks, theirs = block_lists(order.groups), order.prefill.block_lists()
    parts: dict[int, list[Descriptors]] = {}
    for layer, plan in plan_layers(local, siblings, remotes).items():
        if layer not in missing:
            for source, rows in compile_plan(plan, blocks, theirs, tokens=order.tokens).items():
                parts.setdefault(source, []).append(rows)
    pieces.all = [
        LoadPiece(0, order.computed, {source: Copies(concatenate(rows)) for source, rows in parts.items()}),
        rest,
    ]


def _first_half(copies: Copies) -> Descriptors:
    """At least one descriptor, where there is any."""
    rows = [copies.descriptors, *([copies.selection.descriptors()] if copies.selection is not None else [])]
    whole = concatenate(rows)
    count = (len(whole) + 1) // 2
    return Descriptors(whole.local[:count], whole.remote[:count], whole.length[:count])
