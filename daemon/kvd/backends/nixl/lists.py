"""Grids prepared in NIXL once a lane, so that a request with scattered blocks needs only the numbers of its cells."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvd.backends.errors import BackendError
from kvd.backends.nixl.agent import Agent
from kvd.backends.nixl.descriptors import memories, side
from kvd.backends.regions import RegisteredMemory
from kvd.topology.descriptors import Int64
from kvd.topology.grid import Grid

_INITIATOR = "NIXL_INIT_AGENT"

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class PreparedLists:
    """The prepared lists of one lane towards one peer: a pair of NIXL's handles for each grid.

    The handles refer to NIXL's agent, as all of its objects do, so they must be released before the agent is destroyed.
    A grid that NIXL does not take is remembered as None and logged once: its copies go by address, and if an address is
    what is wrong, NIXL says so there.
    """

    _pairs: dict[Grid, list[Any] | None] = field(default_factory=dict)

    def of(
        self, agent: Agent, peer: str, grid: Grid, here: RegisteredMemory, there: RegisteredMemory
    ) -> list[Any] | None:
        """The local and the remote list of ``grid``, or None where there is no such thing."""
        if grid not in self._pairs:
            self._pairs[grid] = _prepared(agent, peer, grid, here, there)
        return self._pairs[grid]

    def take(self) -> list[Any]:
        """All handles, to be released; nothing that `of` gave out holds one any more."""
        taken: list[Any] = []
        for pair in self._pairs.values():
            while pair:
                taken.append(pair.pop())
        self._pairs.clear()
        return taken


def _prepared(
    agent: Agent, peer: str, grid: Grid, here: RegisteredMemory, there: RegisteredMemory
) -> list[Any] | None:
    if len(memories(here)) > 1 or len(memories(there)) > 1:
        return None  # a list of NIXL's is all DRAM or all VRAM, and a grid may have rows in both
    pair: list[Any] = []
    try:
        for name, rows, memory in (
            (_INITIATOR, _strided(grid.local, grid.length, grid.local_stride, grid.local_blocks, here), here),
            (peer, _strided(grid.remote, grid.length, grid.remote_stride, grid.remote_blocks, there), there),
        ):
            pair.append(
                agent.call(
                    f"prepare {len(grid)} rows over all blocks",
                    "prep_xfer_dlist",
                    name,
                    rows,
                    memories(memory)[0],
                )
            )
    except BackendError as refused:
        agent.release(pair)
        _log.warning(
            "scattered blocks of %s are copied by address, which is slower: %s", peer, refused.message
        )
        return None
    return pair


def _strided(
    address: Int64, length: Int64, stride: Int64, blocks: int, memory: RegisteredMemory
) -> NDArray[np.uint64]:
    """NIXL's compressed form: (address, bytes, device ordinal, stride, count), shape (n, 5)."""
    table = np.empty((len(address), 5), np.uint64)
    table[:, :3] = side(address, length, memory)
    table[:, 3], table[:, 4] = stride, blocks
    return table
