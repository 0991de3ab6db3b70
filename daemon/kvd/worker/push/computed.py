"""How far each pushed request is computed, layer by layer, and which decoders still wait for their part of it.

Three threads meet here: vLLM's step writes down what it computes, senders read it and settle targets, the session's
thread writes down who announced. The lock is held for operations on dictionaries only.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvd.geometry.rank import Rank
from kvd.topology.blocks import BlockList
from kvd.worker.cause import ABORTED, Cause
from kvd.worker.orders import PushEnd, PushStep, block_lists, plain
from kvd.worker.push.milestones import ALL_LAYERS, Computed, Milestone
from kvd.worker.stream_event import StreamEvent

MILESTONES = 16
"""Most milestones for each layer; a device is never so many steps behind, so the oldest are overtaken ones."""
MOST_TRANSFERS = 4096
"""Most transfers that are announced, and most that are remembered after their end."""
REMEMBERED = 600.0
"""Seconds for which the end of a transfer is remembered: announcements may come late, and more than once."""
GRACE = 5.0
"""Seconds beyond its time for which a request's blocks wait for senders that do not come to an end."""
NOT_KEPT = Cause("its blocks are no longer kept", "LEASE_ENDED")


class Wake(Protocol):
    """Has a sender look again; where that is not ``urgent``, when it has more to look at."""

    def __call__(self, *, urgent: bool) -> None:
        """Any thread calls it."""


@dataclass(slots=True)
class _Transfer:
    """A pushed request; ``until`` is the time.monotonic() until which its blocks are kept, once it has ended.

    ``served``: whoever waited under this id had what it waited for, of an earlier request.
    ``kept``: it has ended well, of which the scheduler told ahead of the step that says so.
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
    cause: Cause | None = None
    known: Computed | None = None
    more: bool = True
    changes: int = 0

    def changed(self) -> None:
        self.known = None
        self.changes += 1


@dataclass(slots=True)
class _Owed:
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
        return not self.waiting and (self.gone or (self.ranks is not None and self.ranks <= self.settled))


class Outgoing:
    """The transfers of one prefilling worker."""

    def __init__(self, record_event: Callable[[], StreamEvent | None]) -> None:
        """``record_event`` gives what tells when the device has come as far as now; None where it is there already."""
        self._record_event = record_event
        self._lock = threading.Lock()
        self._transfers: dict[str, _Transfer] = {}
        self._epochs = itertools.count()
        self._owed: dict[str, dict[str, _Owed]] = {}
        self._idle: dict[
            str, float
        ] = {}  # announced, but of no request here: since when nobody waits any more
        self._ended: set[str] = set()
        self._over: dict[str, tuple[Cause, float]] = {}
        self._now: tuple[str, ...] = ()
        self._by_layer = False
        self._noted: set[str] = set()

    # --- in vLLM's step ---

    def begin(self, steps: Sequence[PushStep], ends: Sequence[PushEnd]) -> bool:
        """A step is about to run. Returns whether it computes anything that is pushed.

        Blocks of what was preempted or aborted are overwritten only after this has returned.
        """
        now = time.monotonic()
        ready = self._record_event() if any(step.held for step in steps) else None
        with self._lock:
            news = [end.transfer_id for end in ends if self._end(end, now)]
            for step in steps:
                self._step(step, ready)
            news += [step.transfer_id for step in steps if step.again or step.held]
            self._now = tuple(step.transfer_id for step in steps if step.groups)
            self._by_layer = any(
                owed.by_layer for name in self._now for owed in self._owed.get(name, {}).values()
            )
            wakes = self._wakes(news) + self._wakes((step.transfer_id for step in steps), by_layer=True)
        self._noted = set()
        _wake(wakes)
        return bool(self._now)

    def saved(self, layer: str) -> None:
        """The step computed this layer's KV. Where nobody waits for single layers the step's end tells of all."""
        if not self._by_layer:
            return
        self._noted.add(layer)
        ready = self._record_event()
        with self._lock:
            self._note((layer,), ready)
            wakes = self._wakes(self._now, by_layer=True)
        _wake(wakes, urgent=False)

    def stepped(self, layers: Iterable[str]) -> None:
        """The step has run: all its layers hold KV, also those without a hook."""
        left = tuple(layer for layer in layers if layer not in self._noted)
        ready = self._record_event() if left else None
        with self._lock:
            self._note(left, ready)
            more = []
            for transfer in self._running():
                transfer.more = transfer.step.reached < transfer.step.total
                transfer.changed()
                if transfer.more:
                    more.append(transfer.step.transfer_id)
            # Of the last step whoever reads whole steps gets nothing before its blocks are certain to stay (`kept`).
            wakes = self._wakes(more) + self._wakes(self._now, by_layer=True)
        self._now, self._by_layer = (), False
        _wake(wakes)

    def sent(self, now: float) -> set[str]:
        """Requests of which no block is needed any more, each once."""
        if not self._ended:
            return set()
        free: set[str] = set()
        wakes: list[Wake] = []
        with self._lock:
            for name in list(self._ended):
                transfer = self._transfers[name]
                owed = self._owed.get(name, {}).values()
                if not transfer.cause and now > transfer.until:
                    transfer.cause = Cause(
                        "its time is over: the prefiller's blocks are no longer kept", "LEASE_ENDED"
                    )
                    transfer.changed()
                    wakes += [o.wake for o in owed]
                waits = any(o.waiting for o in owed)
                late = bool(transfer.cause) and (not waits or now > transfer.until + GRACE)
                if late or (not waits and any(o.done for o in owed)):
                    free.add(transfer.step.request_id)
                    self._forget(name, transfer.cause or NOT_KEPT, now)
        _wake(wakes)
        return free

    def abandon(self) -> set[str]:
        """Requests whose blocks are held, and will be sent to nobody any more."""
        with self._lock:
            held = {self._transfers[name].step.request_id for name in self._ended}
            for name in list(self._ended):
                self._forget(name, NOT_KEPT, time.monotonic())
        return held

    # --- for senders, and on the session's thread ---

    def computed(self, transfer_id: str) -> Computed | None:
        """A transfer as it is now; None where it is not known yet. The same object as long as nothing has changed.

        A sender asks with each look at what is under way, many times for each layer that is computed.
        """
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is None:
                over = self._over.get(transfer_id)
                return Computed(over=over[0]) if over is not None else None
            if transfer.known is not None:
                return transfer.known
            step, epoch, cause, changes = transfer.step, transfer.epoch, transfer.cause, transfer.changes
            kept = (transfer.kept or transfer_id in self._ended) and not cause
            lists, coming, more = transfer.lists, tuple(transfer.coming), transfer.more
        # What the device has not come to yet is not asked beyond its first, and what it has is not asked again: each
        # look takes the GIL from the step that computes.
        reached = list(itertools.takewhile(lambda found: found.ready is None or found.ready(), coming))
        if lists is None or lists[0] is not step:
            lists = transfer.lists = (step, block_lists(step.groups))
        after = coming[len(reached)].tokens if len(reached) < len(coming) else 0
        with self._lock:
            layers = dict(transfer.there) if transfer.epoch == epoch else {}
            for found in reached:
                layers[found.layer] = max(found.tokens, layers.get(found.layer, 0))
            told = step.sums, step.digest, step.request_id, step.traceparent
            answer = Computed(lists[1], step.total, epoch, kept, cause, layers, after, more, *told)
            if transfer.epoch == epoch:
                transfer.there = dict(layers)
                # Another sender may have looked meanwhile, and so may what was noted since have driven out the oldest.
                for found in reached:
                    if transfer.coming and transfer.coming[0] is found:
                        transfer.coming.popleft()
            if transfer.changes == changes and not after:
                transfer.known = answer
        return answer

    def kept(self, transfer_id: str, request_id: str, blocks: Mapping[int, BlockList]) -> None:
        """The request is complete and its blocks stay; the step that says so is yet to come.

        ``blocks`` are of further groups. The device has done all of it: the request's token needed every layer.
        """
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is None or transfer.step.request_id != request_id:
                return
            transfer.kept = True
            if blocks:
                known = transfer.step
                transfer.step = replace(known, groups={**known.groups, **plain(blocks)}, reached=known.total)
                self._add(transfer, Milestone(ALL_LAYERS, known.total))
            transfer.changed()
            wakes = self._wakes((transfer_id,))
        _wake(wakes)

    def epoch(self, transfer_id: str) -> int:
        """Of a transfer as it is now; -1 where it has ended or is not known."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            return -1 if transfer is None else transfer.epoch

    def announced(
        self, transfer_id: str, decoder: str, rank: Rank, wake: Wake, *, by_layer: bool = True
    ) -> bool:
        """A worker of a decoder waits for its part. False where too many transfers are announced already.

        Without ``by_layer`` it is told of whole steps, and single layers need no event of the device.
        """
        with self._lock:
            if transfer_id not in self._owed and len(self._owed) >= MOST_TRANSFERS:
                self._tidy(time.monotonic())
                if len(self._owed) >= MOST_TRANSFERS:
                    return False
            owed = self._owed.setdefault(transfer_id, {}).setdefault(decoder, _Owed(wake))
            owed.by_layer = owed.by_layer or by_layer
            self._by_layer = self._by_layer or (by_layer and transfer_id in self._now)
            owed.waiting.add(rank)
            owed.settled.discard(rank)
            owed.gone = False
            self._idle.pop(transfer_id, None)
        return True

    def workers(self, transfer_id: str, decoder: str, ranks: frozenset[Rank]) -> None:
        """Which workers a decoder has."""
        with self._lock:
            if owed := self._owed.get(transfer_id, {}).get(decoder):
                owed.ranks = ranks

    def settled(self, transfer_id: str, decoder: str, rank: Rank) -> None:
        """Nothing is owed to a worker any more: it has its part, does not want it or cannot have it."""
        with self._lock:
            if owed := self._owed.get(transfer_id, {}).get(decoder):
                owed.waiting.discard(rank)
                owed.settled.add(rank)
                self._rest(transfer_id)

    def decoder_gone(self, transfer_id: str, decoder: str) -> None:
        """A decoder is no more: none of its workers will ask."""
        with self._lock:
            if owed := self._owed.get(transfer_id, {}).get(decoder):
                owed.gone = True
                owed.waiting.clear()
                self._rest(transfer_id)

    # --- with the lock held ---

    def _step(self, step: PushStep, ready: StreamEvent | None) -> None:
        transfer = self._transfers.get(step.transfer_id)
        if transfer is None or transfer.step.request_id != step.request_id:
            before, _ = self._over.pop(step.transfer_id, (None, 0.0))
            self._idle.pop(step.transfer_id, None)
            transfer = self._transfers[step.transfer_id] = _Transfer(step, next(self._epochs))
            transfer.served = before is NOT_KEPT
        transfer.step, transfer.more = step, True
        transfer.changed()
        if step.again:
            transfer.epoch, transfer.kept = next(self._epochs), False
            transfer.there, transfer.coming = {}, deque()
        if step.held:
            self._add(transfer, Milestone(ALL_LAYERS, step.held, ready))

    def _end(self, end: PushEnd, now: float) -> bool:
        """Whether that is news to senders, who may have been told ahead of it that the blocks stay."""
        transfer = self._transfers.get(end.transfer_id)
        if transfer is not None and transfer.step.request_id != end.request_id:
            return False
        if end.cause or transfer is None:
            self._forget(end.transfer_id, end.cause or ABORTED, now)
        else:
            transfer.until = now + end.seconds
            if transfer.served and end.transfer_id not in self._owed:
                transfer.cause = NOT_KEPT  # a decoder takes an id once: nobody will announce
            transfer.changed()
            self._ended.add(end.transfer_id)
        return bool(end.cause) or transfer is None or bool(transfer.cause) or not transfer.kept

    def _forget(self, transfer_id: str, cause: Cause, now: float) -> None:
        self._transfers.pop(transfer_id, None)
        self._ended.discard(transfer_id)
        while len(self._over) >= MOST_TRANSFERS:
            self._over.pop(next(iter(self._over)))
        self._over[transfer_id] = (cause, now)
        self._rest(transfer_id)

    def _rest(self, transfer_id: str) -> None:
        """Forget who was owed a transfer that is over; note since when nobody waits for one that never came."""
        owed = self._owed.get(transfer_id)
        if owed is None or transfer_id in self._transfers or any(o.waiting for o in owed.values()):
            return
        if transfer_id in self._over:
            del self._owed[transfer_id]
            self._idle.pop(transfer_id, None)
        else:
            self._idle.setdefault(transfer_id, time.monotonic())

    def _tidy(self, now: float) -> None:
        for name in [name for name, since in self._idle.items() if now > since + REMEMBERED]:
            del self._idle[name], self._owed[name]
        for name in [name for name, (_, since) in self._over.items() if now > since + REMEMBERED]:
            del self._over[name]

    def _running(self) -> list[_Transfer]:
        """What the step computes that is not over."""
        return [self._transfers[name] for name in self._now if name in self._transfers]

    def _note(self, layers: Iterable[str], ready: StreamEvent | None) -> None:
        """The step has computed these layers, of all that it computes."""
        for transfer in self._running():
            for layer in layers:
                self._add(transfer, Milestone(layer, transfer.step.reached, ready))

    @staticmethod
    def _add(transfer: _Transfer, milestone: Milestone) -> None:
        transfer.changed()
        transfer.coming.append(milestone)
        transfer.there.setdefault(milestone.layer, 0)
        if len(transfer.coming) > MILESTONES * len(transfer.there):
            transfer.coming.popleft()

    def _wakes(self, transfers: Iterable[str], *, by_layer: bool = False) -> list[Wake]:
        """Of who waits for these; with ``by_layer`` of who is sent single layers."""
        owed = (found for name in transfers for found in self._owed.get(name, {}).values())
        return [found.wake for found in owed if found.by_layer or not by_layer]


def _wake(wakes: Iterable[Wake], *, urgent: bool = True) -> None:
    for wake in wakes:
        wake(urgent=urgent)
