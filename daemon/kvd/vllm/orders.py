"""What the scheduler's half tells the workers in one step, and what they answer: plain data that pickles."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvd.topology.plan import BlockList
from kvd.vllm.params import RemotePrefill

Blocks = tuple[int, tuple[int, ...]]
"""(first, ids) of a `BlockList`, in a form that crosses processes cheaply."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load one request's KV from a remote prefiller.

    ``groups`` gives the local blocks to fill by group index. ``seconds`` from now the load must be complete,
    or it is a miss. ``refused`` is the cause where the load must be reported as failed without being tried
    (policy ``fail``). ``claimed`` is time.monotonic() of the scheduler's claim.
    """

    request_id: str
    prefill: RemotePrefill
    groups: dict[int, Blocks]
    tokens: int
    seconds: float
    claimed: float
    handshake_seconds: float = 0.0
    refused: str = ""

    def block_lists(self) -> dict[int, BlockList]:
        """The local blocks by group index."""
        return {
            g: BlockList(first=first, ids=np.array(ids, np.int64)) for g, (first, ids) in self.groups.items()
        }

    @property
    def block_ids(self) -> set[int]:
        """All local blocks of the load."""
        return {block for _, ids in self.groups.values() for block in ids}


@dataclass(slots=True)
class StepOrders:
    """Everything for one step: loads to start, and requests whose blocks the prefiller may free now."""

    loads: list[LoadOrder] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)


@dataclass(slots=True)
class StepOutcomes:
    """What happened to loads since the last step, by request.

    An empty string for done, else the cause of the miss.
    """

    loads: dict[str, str] = field(default_factory=dict)

    def merge(self, other: StepOutcomes) -> StepOutcomes:
        """Both workers' outcomes; a miss on any worker is a miss."""
        merged = dict(self.loads)
        for request_id, cause in other.loads.items():
            merged[request_id] = merged.get(request_id) or cause
        return StepOutcomes(merged)
