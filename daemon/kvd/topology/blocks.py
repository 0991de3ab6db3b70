"""Which of a request's blocks have to move: what the group's kind needs, less what the reader has already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvd.geometry.model import Group, GroupKind
from kvd.topology.descriptors import Int64

NULL_BLOCK = 0
"""vLLM's id for "no block here": blocks that left a window, states that were superseded."""


@dataclass(frozen=True, slots=True)
class BlockList:
    """One request's blocks of one group: ``ids[i]`` covers the tokens of the request's block number ``first + i``.

    For a state group ``first`` has no meaning: ids are matched one to one.
    """

    first: int
    ids: Int64


def first_needed(kind: GroupKind, block_size: int, window: int | None, *, tokens: int, computed: int) -> int:
    """Number of the first block that a reader of ``tokens`` tokens needs, having ``computed`` of them already.

    The next token computed is number ``tokens - 1`` at the earliest, because a reader of a whole prompt computes its
    last token again. A window of ``w`` ends at the token itself. So the first token needed is ``tokens - w``. Chunked
    attention needs the chunk of that token.
    """
    first = max(0, computed)
    if kind in ("sliding_window", "chunked") and window:
        first = max(first, window_start(kind, window, tokens))
    return first // block_size


def moved_blocks(group: Group, tokens: int) -> tuple[int, int]:
    """Number of the first block that moves to a reader that has none, and how many do; of a state one."""
    if group.kind == "mamba":
        return 0, 1
    first = first_needed(group.kind, group.block_size, group.window, tokens=tokens, computed=0)
    return first, -(-tokens // group.block_size) - first


def window_start(kind: GroupKind, window: int, tokens: int) -> int:
    """First token that a query at position ``tokens - 1`` or later attends to.

    A request whose every token is known computes its last one again, so that is the earliest query there can be.
    """
    if kind == "chunked":
        return (tokens - 1) // window * window
    return tokens - window


def offered(kind: GroupKind, ids: Sequence[int], scratch_blocks: int = 0) -> BlockList:
    """What a prefiller has of one group, from its block table.

    Leading null blocks are stripped; of a state group it is the one block that holds the running state (trailing
    speculative scratch blocks never move).
    """
    if kind == "mamba":
        state = _state_block(ids, scratch_blocks)
        return BlockList(first=0, ids=np.array(state, np.int64))
    first = next((i for i, block in enumerate(ids) if block != NULL_BLOCK), len(ids))
    return BlockList(first=first, ids=np.array(ids[first:], np.int64))


def wanted(
    kind: GroupKind,
    block_size: int,
    window: int | None,
    ids: Sequence[int],
    *,
    tokens: int,
    computed: int,
    scratch_blocks: int = 0,
) -> BlockList:
    """What a decoder must load of one group, from its block table.

    The blocks that hold tokens ``computed .. tokens``.
    """
    if kind == "mamba":
        return BlockList(first=0, ids=np.array(_state_block(ids, scratch_blocks), np.int64))
    first = first_needed(kind, block_size, window, tokens=tokens, computed=computed)
    last = -(-tokens // block_size)
    while first < last and first < len(ids) and ids[first] == NULL_BLOCK:
        first += 1
    return BlockList(first=first, ids=np.array(ids[first:last], np.int64))


def _state_block(ids: Sequence[int], scratch_blocks: int) -> list[int]:
    kept = ids[: max(1, len(ids) - scratch_blocks)]
    return [block for block in kept[-1:] if block != NULL_BLOCK]
