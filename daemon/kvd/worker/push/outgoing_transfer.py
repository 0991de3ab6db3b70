"""One pushed request of a prefilling worker as its steps note it, and what each decoder waits for of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvd.geometry.rank import Rank
from kvd.topology.blocks import BlockList
from kvd.worker.cause import Cause
from kvd.worker.orders import PushStep
from kvd.worker.push.milestones import Computed, Milestone

MILESTONES = 16
"""Most milestones for each layer; a device is never so many steps behind, so the oldest are overtaken ones."""


class Wake(Protocol):
    """Has a sender look again; where that is not ``urgent``, when it has more to look at."""

    def __call__(self, *, urgent: bool) -> None:
        """Any thread calls it."""


@dataclass(slots=True)
class OutgoingTransfer:
    """A pushed request; ``until`` is the time.monotonic() until which its blocks are kept, once it has ended.

    ``served``: whoever waited under this id had what it waited for, of an earlier request.
    ``kept``: it has ended well, of which the scheduler told ahead of the step that says so.
    ``early`` are the layers of its last step that were marked (`kvd.worker.push.marks`).
    ``lists`` are the blocks of a step as arrays, made when they are first asked for; ``known`` is what is answered
    about it until something changes, ``changes`` counts that. ``there`` is how far each layer was when it was last
    looked at, ``coming`` what was noted and was not there yet, in the order in which the device comes to it. ``more``:
    the last step of its prompt has not run yet.
    """

    step: PushStep
    epoch: int
    lists: tuple[PushStep, dict[int, BlockList]] | None = None
    there: dict[str, int] = field(default_factory=dict)
    coming: deque[Milestone] = field(default_factory=deque)
    until: float = math.inf
    served: bool = False
    kept: bool = False
    early: frozenset[str] = frozenset()
    cause: Cause | None = None
    known: Computed | None = None
    more: bool = True
    changes: int = 0

    def changed(self) -> None:
        """What was answered about it is no longer so."""
        self.known = None
        self.changes += 1

    def note(self, milestone: Milestone) -> None:
        """The step has computed that much of it, as soon as the device has."""
        self.changed()
        self.coming.append(milestone)
        for layer in milestone.layers:
            self.there.setdefault(layer, 0)
        if len(self.coming) > MILESTONES * len(self.there):
            self.coming.popleft()

    def reach(self, milestones: Sequence[Milestone]) -> None:
        """The device has come to these. Another sender may have seen it too, and the oldest may be driven out."""
        add_reached(self.there, milestones)
        for found in milestones:
            if self.coming and self.coming[0] is found:
                self.coming.popleft()


def add_reached(layers: dict[str, int], milestones: Sequence[Milestone]) -> None:
    """Note in ``layers``, which are tokens by layer, that the device has come to these."""
    for found in milestones:
        for layer in found.layers:
            layers[layer] = max(found.tokens, layers.get(layer, 0))


@dataclass(slots=True)
class Owed:
    """What one decoding engine waits for; ``ranks`` are all its workers, None while its card is not known.

    ``by_layer``: each layer is sent as soon as it is computed, not each step.
    """

    wake: Wake
    by_layer: bool = False
    ranks: frozenset[Rank] | None = None
    waiting: set[Rank] = field(default_factory=set)
    settled: set[Rank] = field(default_factory=set)
    gone: bool = False

    @property
    def done(self) -> bool:
        """Whether nobody of it waits, or will."""
        return not self.waiting and (self.gone or (self.ranks is not None and self.ranks <= self.settled))
