"""How far each pushed request is computed, layer by layer, and which decoders still wait for their part of it.

Three threads meet here: vLLM's step writes down what it computes, senders read it and settle targets, the session's
thread writes down who announced. The lock is held for operations on dictionaries only.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from kvd.geometry.rank import Rank
from kvd.topology.blocks import BlockList
from kvd.worker.cause import ABORTED, Cause
from kvd.worker.orders import PushEnd, PushStep, block_lists, plain
from kvd.worker.push.marks import completes, mark_numbers
from kvd.worker.push.milestones import ALL_LAYERS, Computed, Milestone
from kvd.worker.push.outgoing_transfer import OutgoingTransfer, Owed, Wake, add_reached
from kvd.worker.streams.event import StreamEvent
from kvd.worker.streams.watch import StreamWatch

MOST_TRANSFERS = 4096
"""Most transfers that are announced, and most that are remembered after their end."""
REMEMBERED = 600.0
"""Seconds for which the end of a transfer is remembered: announcements may come late, and more than once."""
GRACE = 5.0
"""Seconds beyond its time for which a request's blocks wait for senders that do not come to an end."""
NOT_KEPT = Cause("its blocks are no longer kept", "LEASE_ENDED")


class Outgoing:
    """The transfers of one prefilling worker."""

    def __init__(self, record_event: Callable[[], StreamEvent | None], hooks: int = 0) -> None:
        """``record_event`` gives what tells when the device has come as far as now; None where it is there already.

        ``hooks``: of how many layers each step says when it has computed them.
        """
        self._record_event = record_event
        self._mark_numbers = mark_numbers(hooks)
        self._watch: StreamWatch[Sequence[str]] = StreamWatch("kvd-steps", self._reached)
        self._lock = threading.Lock()
        self._transfers: dict[str, OutgoingTransfer] = {}
        self._epochs = itertools.count()
        self._owed: dict[str, dict[str, Owed]] = {}
        self._idle: dict[
            str, float
        ] = {}  # announced, but of no request here: since when nobody waits any more
        self._ended: set[str] = set()
        self._over: dict[str, tuple[Cause, float]] = {}
        self._now: tuple[str, ...] = ()
        self._hooked = self._by_layer = False
        self._noted: set[str] = set()
        self._completed: tuple[str, ...] = ()  # what the step completes and marks
        self._passed: list[str] = []  # layers of the step so far
        self._marked = 0  # of these, those before the last mark
        self._last_event: StreamEvent | None = None

    # --- in vLLM's step ---

    def begin(self, steps: Sequence[PushStep], ends: Sequence[PushEnd]) -> bool:
        """A step is about to run. Returns whether it computes anything that is pushed.

        Blocks of what was preempted or aborted are overwritten only after this has returned.
        """
        now = time.monotonic()
        held = [step.transfer_id for step in steps if self._holds_more(step)]
        ready = self._record_event() if held else None
        with self._lock:
            news = [end.transfer_id for end in ends if self._end(end, now)]
            completed = [step.transfer_id for step in steps if completes(step, self._before(step))]
            for step in steps:
                self._step(
                    step, Milestone((ALL_LAYERS,), step.held, ready) if step.transfer_id in held else None
                )
            news += [step.transfer_id for step in steps if step.again]
            self._now = tuple(step.transfer_id for step in steps if step.groups)
            self._by_layer = any(self._awaited(name, by_layer=True) for name in self._now)
            self._completed = tuple(name for name in completed if self._awaited(name, by_layer=False))
            self._hooked = self._by_layer or bool(self._completed)
            wakes = self._wakes(news) + self._wakes((step.transfer_id for step in steps), by_layer=True)
            wakes += self._when(ready, held)
        self._noted, self._passed, self._marked, self._last_event = set(), [], 0, None
        _wake(wakes)
        return bool(self._now)

    def saved(self, layer: str) -> None:
        """The step computed this layer's KV.

        Where nobody waits for single layers, nor for the marks of a prompt's last step, its end tells of all.
        """
        if not self._hooked:
            return
        self._passed.append(layer)
        marks = self._completed and len(self._passed) in self._mark_numbers
        if not (marks or self._by_layer):
            return
        self._last_event = ready = self._record_event()
        wakes: list[Wake] = []
        by_layer: list[Wake] = []
        with self._lock:
            if self._by_layer:
                self._noted.add(layer)
                for transfer in self._running(self._now):
                    transfer.note(Milestone((layer,), transfer.step.reached, ready))
                by_layer = self._wakes(self._now, by_layer=True)
            if marks:
                wakes = self._note_mark(ready)
        _wake(by_layer, urgent=False)
        _wake(wakes)

    def stepped(self, layers: Iterable[str]) -> None:
        """The step has run: all its layers hold KV, also those without a hook."""
        left = not all(layer in self._noted for layer in layers)
        ready = self._record_event() if left else self._last_event
        with self._lock:
            more = []
            for transfer in self._running(self._now):
                if left:
                    transfer.note(Milestone((ALL_LAYERS,), transfer.step.reached, ready))
                transfer.more = transfer.step.reached < transfer.step.total
                transfer.changed()
                if transfer.more:
                    more.append(transfer.step.transfer_id)
            # Beyond its marks whoever reads whole steps gets nothing of the last one before its blocks are certain to
            # stay (`kept`).
            wakes = self._when(ready, more) + self._wakes(self._now, by_layer=True)
        self._now, self._completed, self._hooked, self._by_layer = (), (), False, False
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

    def stop(self) -> None:
        """Wake nobody any more for what the device has done: begin that."""
        self._watch.stop()

    def join(self, until: float) -> bool:
        """Wait for that, to time.monotonic() ``until``. False where the device holds it up."""
        return self._watch.join(until)

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
            # As it is now: what a later step computes, at which others may look meanwhile, is not in these blocks.
            early, layers = transfer.early, dict(transfer.there)
        # What the device has not come to yet is not asked beyond its first, and what it has is not asked again: each
        # look takes the GIL from the step that computes.
        reached = list(itertools.takewhile(lambda found: found.ready is None or found.ready(), coming))
        if lists is None or lists[0] is not step:
            lists = transfer.lists = (step, block_lists(step.groups))
        after = coming[len(reached)].tokens if len(reached) < len(coming) else 0
        add_reached(layers, reached)
        told = step.sums, step.digest, step.request_id, step.traceparent
        answer = Computed(lists[1], step.total, epoch, kept, cause, early, layers, after, more, *told)
        with self._lock:
            if transfer.epoch == epoch:
                transfer.reach(reached)
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
                transfer.note(Milestone((ALL_LAYERS,), known.total))
            transfer.changed()
            wakes = self._wakes((transfer_id,))
        _wake(wakes)

    def epoch(self, transfer_id: str) -> int:
        """Of a transfer as it is now; -1 where it has ended or is not known."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            return -1 if transfer is None else transfer.epoch

    def announced(self, transfer_id: str, decoder: str, rank: Rank, wake: Wake, *, by_layer: bool) -> bool:
        """A worker of a decoder waits for its part. False where too many transfers are announced already.

        Without ``by_layer`` it is told of whole steps, and single layers need no event of the device.
        """
        with self._lock:
            if transfer_id not in self._owed and len(self._owed) >= MOST_TRANSFERS:
                self._tidy(time.monotonic())
                if len(self._owed) >= MOST_TRANSFERS:
                    return False
            owed = self._owed.setdefault(transfer_id, {}).setdefault(decoder, Owed(wake))
            owed.by_layer = owed.by_layer or by_layer
            if by_layer and transfer_id in self._now:
                self._by_layer = self._hooked = True
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

    def _step(self, step: PushStep, held: Milestone | None) -> None:
        transfer = self._transfers.get(step.transfer_id)
        if transfer is None or transfer.step.request_id != step.request_id:
            before, _ = self._over.pop(step.transfer_id, (None, 0.0))
            self._idle.pop(step.transfer_id, None)
            transfer = self._transfers[step.transfer_id] = OutgoingTransfer(step, next(self._epochs))
            transfer.served = before is NOT_KEPT
        transfer.step, transfer.more, transfer.early = step, True, frozenset()
        transfer.changed()
        if step.again:
            transfer.epoch, transfer.kept = next(self._epochs), False
            transfer.there, transfer.coming = {}, deque()
        if held is not None:
            transfer.note(held)

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

    def _before(self, step: PushStep) -> PushStep | None:
        """The step before of the same request."""
        known = self._transfers.get(step.transfer_id)
        return known.step if known is not None and known.step.request_id == step.request_id else None

    def _holds_more(self, step: PushStep) -> bool:
        """Whether more of a request is there before the step than the end of the one before told of."""
        before = None if step.again else self._before(step)
        return step.held > (before.reached if before is not None else 0)

    def _running(self, names: Iterable[str]) -> list[OutgoingTransfer]:
        """Of what the step computes that which is not over."""
        return [self._transfers[name] for name in names if name in self._transfers]

    def _note_mark(self, ready: StreamEvent | None) -> list[Wake]:
        """The step has computed all layers that it passed, of the prompts that it completes."""
        layers, self._marked = tuple(self._passed[self._marked :]), len(self._passed)
        for transfer in self._running(self._completed):
            transfer.early |= frozenset(layers)
            transfer.note(Milestone(layers, transfer.step.reached, ready))
        return self._when(ready, self._completed)

    def _awaited(self, transfer_id: str, *, by_layer: bool) -> bool:
        """Whether somebody waits for it who is sent single layers; without ``by_layer``, who reads whole steps."""
        owed = self._owed.get(transfer_id, {}).values()
        return any(found.waiting and found.by_layer is by_layer for found in owed)

    def _when(self, ready: StreamEvent | None, transfers: Sequence[str]) -> list[Wake]:
        """Whom to wake now for these; who reads whole steps is woken once the device has come to ``ready``.

        Who is sent single layers looks at the device itself.
        """
        if ready is None or not transfers:
            return self._wakes(transfers)
        if any(name not in self._owed or self._awaited(name, by_layer=False) for name in transfers):
            self._watch.put(ready, transfers)
        return self._wakes(transfers, by_layer=True)

    def _reached(self, transfers: Sequence[str]) -> None:
        """The device has come to an event of these: on the thread that waits for it."""
        with self._lock:
            owed = [found for name in transfers for found in self._owed.get(name, {}).values()]
            wakes = [found.wake for found in owed if found.waiting and not found.by_layer]
        _wake(dict.fromkeys(wakes))

    def _wakes(self, transfers: Iterable[str], *, by_layer: bool = False) -> list[Wake]:
        """Of who waits for these; with ``by_layer`` of who is sent single layers."""
        owed = (found for name in transfers for found in self._owed.get(name, {}).values())
        return [found.wake for found in owed if found.by_layer or not by_layer]


def _wake(wakes: Iterable[Wake], *, urgent: bool = True) -> None:
    for wake in wakes:
        wake(urgent=urgent)
