"""Whether a transfer's blocks can be true, beyond the shape of its line. Reader and writer hold to the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvd.geometry.model import EngineGeometry
from kvd.trace.errors import BadTrace, TraceTooLarge
from kvd.trace.model import MAX_BLOCKS, TracedBlocks, TransferLine


@dataclass(frozen=True, slots=True)
class EngineBounds:
    """What an engine's transfers may name: so many groups, so many blocks."""

    groups: int
    blocks: int


def bounds_of(geometry: EngineGeometry | None) -> EngineBounds | None:
    """The bounds of an engine; None of one that is not known, which allows anything."""
    if geometry is None:
        return None
    workers = geometry.workers
    return EngineBounds(max(len(w.groups) for w in workers), max(w.num_blocks for w in workers))


def check_blocks(transfer: TransferLine, engines: Sequence[EngineBounds | None]) -> None:
    """Engines that exist, groups and blocks that they have, each local block once.

    Raises `BadTrace` or `TraceTooLarge` that names the values.
    """
    sides = (
        ("local", transfer.local, transfer.local_blocks),
        ("remote", transfer.remote, transfer.remote_blocks),
    )
    for side, engine, lists in sides:
        if engine >= len(engines):
            raise BadTrace(f"the {side} engine is number {engine} of {len(engines)}")
        if (total := sum(blocks.count for blocks in lists)) > MAX_BLOCKS:
            raise TraceTooLarge(f"{total} {side} blocks; at most {MAX_BLOCKS} are taken")
        if len({blocks.group for blocks in lists}) < len(lists):
            raise BadTrace(f"two {side} lists of one group")
        for blocks in lists:
            _check_bounds(f"{side} group {blocks.group}", blocks, engines[engine])
            if side == "local":
                _check_once(f"local group {blocks.group}", blocks)


def _check_bounds(what: str, blocks: TracedBlocks, bounds: EngineBounds | None) -> None:
    if bounds is None:
        return
    if blocks.group >= bounds.groups:
        raise BadTrace(f"{what}: the engine has {bounds.groups} groups")
    for start, count in blocks.runs:
        if start + count > bounds.blocks:
            raise BadTrace(f"{what}: blocks {start} to {start + count - 1}, the engine has {bounds.blocks}")


def _check_once(what: str, blocks: TracedBlocks) -> None:
    end = 0
    for start, count in sorted(blocks.runs):
        if start < end:
            raise BadTrace(f"{what}: block {start} stands there twice")
        end = start + count
