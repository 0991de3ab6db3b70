"""How far one pushed transfer is: what a step noted of it, and what a sender is told when it looks."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd.topology.blocks import BlockList
from kvd.worker.cause import Cause
from kvd.worker.streams.event import StreamEvent

ALL_LAYERS = ""
"""Stands for all layers among the layers of milestones."""


@dataclass(frozen=True, slots=True, eq=False)
class Milestone:
    """KV of so many tokens of these layers is there, once the device has come so far."""

    layers: tuple[str, ...]
    tokens: int
    ready: StreamEvent | None = None


@dataclass(frozen=True)
class Computed:
    """One transfer at one moment.

    ``blocks`` are the request's by group. ``epoch`` is another one after each preemption, and for another request under
    the same id; none comes twice. What was read from its blocks counts only while that is the same. ``kept``: it is
    complete and its blocks stay. ``over`` is the cause where nothing of it can be sent any more. ``early`` are layers
    that may be read to the prompt's end before its blocks are certain to stay (`kvd.worker.push.marks`). ``coming``: up
    to which token what was noted next goes, of that which the device has yet to do; 0 where it has done all. ``more``:
    the last step of its prompt has not run yet. ``sums``: its KV is added up. ``digest`` is of the prompt,
    ``traceparent`` of the request; both are empty before it is known.
    """

    blocks: dict[int, BlockList] = field(default_factory=dict)
    total: int = 0
    epoch: int = 0
    kept: bool = False
    over: Cause | None = None
    early: frozenset[str] = frozenset()
    layers: dict[str, int] = field(default_factory=dict)
    coming: int = 0
    more: bool = False
    sums: bool = False
    digest: str = ""
    request_id: str = ""
    traceparent: str = ""

    def reached(self, layer: str) -> int:
        """Tokens of which a layer holds KV."""
        return max(self.layers.get(layer, 0), self.layers.get(ALL_LAYERS, 0))
