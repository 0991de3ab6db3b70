"""What one decoding engine is pushed: a thread that owns the lane to it and all its targets.

It is level-triggered. Whatever wakes it, it looks at how far each request is computed, posts what is computed and not
posted, polls what is under way, and tells each decoding worker what is there. Nothing queues up behind a slow peer but
the tokens themselves: what became ready meanwhile goes into the next post together.

A post that failed or does not end may still land, whatever is done here (`kvd.worker.push.write_lanes`). Its target
fails and is never called quiesced, so the decoder closes its window. Only what could not be started is posted again.
"""

from __future__ import annotations

import functools
import math
import time
from concurrent.futures import Future

from kvd.backends.errors import BackendError
from kvd.client.errors import RefusedByDaemon
from kvd.geometry.rank import Rank
from kvd.shown import logger
from kvd.topology.errors import TopologyError
from kvd.wire.agent import HeldPeer
from kvd.wire.card_parts import ToldCard
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer
from kvd.wire.push import PushAnnounce, PushDone, PushKey, PushWithdraw
from kvd.worker.cause import Cause, from_error
from kvd.worker.context import WorkerContext
from kvd.worker.inbox_thread import InboxThread, Rounds
from kvd.worker.peers.followed import FollowedPeer, PeerChanged
from kvd.worker.peers.handshake import ask_for_peer
from kvd.worker.peers.held import Evict
from kvd.worker.push.computed import Outgoing
from kvd.worker.push.looks import FAST_FOR, PACE, POLL, POLL_SLOW, Looks
from kvd.worker.push.send_step import advance, awaits_device, evict, poll, quiesce
from kvd.worker.push.target import (
    KEEP,
    Acknowledged,
    DecoderAnswered,
    Name,
    PushTarget,
    TargetPhase,
    forgettable,
    note_acknowledged,
    nothing,
    of_another_host,
    progress,
    release_at,
    same,
)
from kvd.worker.push.write_lanes import WriteLanes
from kvd.worker.staging import Stager

log = logger(__name__)

TIDY = 1.0
"""Seconds between two looks for targets that need not be remembered any more."""
HANDSHAKE_SECONDS, LEAST_KEPT = 10.0, 5.0
"""Seconds for a decoder's card to come, and for which a message to a decoder is repeated at least."""

_SenderWord = PushAnnounce | PushWithdraw | PushDone | Acknowledged | DecoderAnswered | PeerChanged | Evict


class Sender:
    """The thread of one decoding engine. All public methods only put something into a queue and return."""

    def __init__(
        self,
        decoder: str,
        context: WorkerContext,
        outgoing: Outgoing,
        stager: Stager | None = None,
    ) -> None:
        self.decoder = decoder
        self._context = context
        self._outgoing = outgoing
        self._stager = stager
        self._looks = Looks()
        self._targets: dict[Name, PushTarget] = {}
        self._live: list[PushTarget] = []  # those for which there is something left to do
        self._tidied = 0.0
        self._peer = FollowedPeer(decoder, context.topology, lambda remote: remote.geometry, role="decoder")
        self._asked: str | None = None
        self._lanes = WriteLanes(decoder, context.backend, context.settings.backend)
        self._behind = self._more = False
        # A cause that stays must not spin.
        rounds = Rounds(self._pause, self._take, self._turn, lambda _: time.sleep(POLL_SLOW), self._finish)
        self._thread = InboxThread(
            f"kvd-send-{decoder[:12]}", f"pushing to {decoder}", rounds, bell=self._looks
        )

    def wake(self, *, urgent: bool) -> None:
        """More is computed; where that is not ``urgent`` it may wait for what is computed next."""
        self._looks.ring(urgent=urgent)

    def take(self, message: PushAnnounce | PushWithdraw | PushDone) -> None:
        """A message of the decoder's."""
        self._thread.put(message)

    def on_peer_changed(self) -> None:
        """Another generation of the decoder is registered, or none."""
        self._thread.put(PeerChanged())

    def evict(self, order: Evict) -> None:
        """Close the lanes; the next post makes another one."""
        self._thread.put(order)

    def held(self) -> list[HeldPeer]:
        """What the thread holds of the decoder, as it is just now; called on any thread."""
        return self._lanes.held(self._open())

    @property
    def idle(self) -> bool:
        """Whether nothing is owed, remembered, waited for or under way; so it stays until a message is put in."""
        return self._thread.idle and self._asked is None and not self._targets and self._lanes.clean

    def stop(self) -> None:
        """Give up whatever is under way and end the thread: begin that."""
        self._thread.stop()

    def join(self, timeout: float) -> bool:
        """Wait for the end after `stop`. False where the backend may still be at work."""
        return self._thread.join(timeout) and self._lanes.clean

    # --- the thread ---

    def _finish(self) -> None:
        self._lanes.leave()
        self._lanes.sweep((), math.inf)

    def _turn(self) -> None:
        now = time.monotonic()
        self._behind = self._more = False
        for target in self._open():
            try:
                self._progress(target, now)
            except Exception as error:  # it must not take the others with it
                log.exception("push of %s to %s", target.key.transfer_id, self.decoder)
                self._lanes.leave()
                target.close(from_error(error, "unexpected error in the sender"))
        self._lanes.sweep((post for target in self._open() for post in target.flying), now)
        for target in self._live:
            if target.news:
                self._tell(target)
            if time.monotonic() >= release_at(target):
                self._release(target)
        self._live = [target for target in self._live if not target.over]
        if now > self._tidied + TIDY:
            self._tidied = now
            self._forget(now)

    def _progress(self, target: PushTarget, now: float) -> None:
        poll(target, self._outgoing, self._lanes)
        if target.phase is TargetPhase.SENDING:
            computed = self._outgoing.computed(target.key.transfer_id)
            advance(target, computed, self._outgoing, self._lanes, self._stager, now)
            if computed is not None:
                # What is copied for a decoder is so layer by layer, of which nobody wakes us.
                woken = self._stager is None
                self._behind = self._behind or awaits_device(target, computed, woken=woken)
                self._more = self._more or computed.more
        if target.phase is TargetPhase.CLOSING:
            quiesce(target, self._lanes, now)

    def _open(self) -> list[PushTarget]:
        return [target for target in self._live if target.phase < TargetPhase.SETTLED]

    def _pause(self) -> float | None:
        open_ = self._open()
        flying = [target for target in open_ if target.flying]
        if flying or self._behind:
            last = [post.transfer.posted for t in flying if t.all_posted for post in t.flying]
            if time.monotonic() - max(last, default=-math.inf) < FAST_FOR:
                return POLL
            return PACE if self._more else POLL_SLOW
        dues = [target.deadline for target in open_ if target.phase is TargetPhase.SENDING]
        dues += self._lanes.due
        dues += [release_at(target) for target in self._live]
        if self._targets:
            dues.append(time.monotonic() + KEEP)
        return max(0.0, min(dues) - time.monotonic()) if dues else None

    # --- what comes in ---

    def _take(self, item: _SenderWord) -> None:
        if isinstance(item, PushAnnounce | PushWithdraw | PushDone) and of_another_host(
            item.key, self._targets
        ):
            return
        match item:
            case PushAnnounce():
                self._announced(item)
            case PushWithdraw():
                self._withdrawn(item)
            case PushDone():
                target = self._find(item.key)
                if target is not None:
                    target.withdrawn = target.withdrawn or target.phase >= TargetPhase.SETTLED
                    target.settle()
                    self._release(target)
            case PeerChanged():
                self._follow()
            case DecoderAnswered():
                self._answered(item)
            case Acknowledged():
                note_acknowledged(item)
            case Evict():
                evict(item, self._open(), self._lanes)

    def _find(self, key: PushKey) -> PushTarget | None:
        target = self._targets.get((key.transfer_id, key.rank))
        return target if target is not None and target.key.attempt == key.attempt else None

    def _announced(self, announce: PushAnnounce) -> None:
        self._follow()
        key = announce.key
        name = (key.transfer_id, key.rank)
        before = self._targets.get(name)
        if before is not None and (key.attempt < before.key.attempt or same(announce, before.announce)):
            if before.phase is TargetPhase.RELEASED:
                self._outgoing.settled(key.transfer_id, self.decoder, key.rank)
            return
        if before is not None and before.withdrawn and key.attempt == before.key.attempt:
            # Withdrawn before it was announced. Whoever waits for it all the same hears that nothing comes.
            self._outgoing.settled(key.transfer_id, self.decoder, key.rank)
            if before.phase >= TargetPhase.SETTLED:
                self._again(before)
            return
        if before is not None and before.flying:
            self._lanes.leave()  # they write into a window that is no more
        target = PushTarget(announce, time.monotonic() + announce.seconds)
        self._put_in(target)
        generation = announce.generations[1]
        if self._peer.generation == generation:
            self._plan(target)
        elif self._asked != generation:
            self._ask(key, generation)

    def _withdrawn(self, message: PushWithdraw) -> None:
        self._follow()
        key = message.key
        target = self._find(key)
        if target is None:
            other = self._targets.get((key.transfer_id, key.rank))
            if other is not None and other.key.attempt > key.attempt:
                return  # the window of that attempt is closed, or this one would not be here
            if other is not None and other.flying:
                self._lanes.leave()
            target = PushTarget(nothing(key), time.monotonic(), withdrawn=True)
            self._put_in(target)
            # It counts as a worker that has its part; who the others are stands in the card.
            self._outgoing.announced(key.transfer_id, self.decoder, key.rank, self.wake, by_layer=False)
            if self._peer.remote is not None:
                self._outgoing.workers(key.transfer_id, self.decoder, self._ranks)
            elif self._asked is None:
                self._ask(key, "")
        target.withdraw()
        if target.news:
            self._again(target)

    def _put_in(self, target: PushTarget) -> None:
        """In the place of an earlier attempt."""
        name = (target.key.transfer_id, target.key.rank)
        before = self._targets.pop(name, None)
        self._live = [live for live in self._live if live is not before]
        self._targets[name] = target
        self._live.append(target)

    def _again(self, target: PushTarget) -> None:
        """Tell the decoder once more what became of a target."""
        target.news = True
        if target not in self._live:
            self._live.append(target)

    # --- the peer ---

    @property
    def _ranks(self) -> frozenset[Rank]:
        """All workers of the decoder, none where it is not known."""
        remote = self._peer.remote
        return frozenset(rank for rank in remote.geometry.by_rank) if remote else frozenset()

    def _ask(self, key: PushKey, generation: str) -> None:
        self._asked = generation

        def answered(found: ToldCard | Cause) -> None:
            if not isinstance(found, Cause):
                self._context.register(found)
            self._thread.put(DecoderAnswered(generation, found if isinstance(found, Cause) else None))

        question = GetPeer(
            local_engine=self._context.engine_id,
            engine_id=key.decoder,
            endpoint=key.decoder_endpoint,
            generation=generation,
        )
        ask_for_peer(self._context.session(), question, HANDSHAKE_SECONDS, answered, role="decoder")

    def _follow(self) -> None:
        """Go by the decoder as it is registered now."""
        generation = self._peer.generation
        if self._peer.parted():
            self._part(generation)
        if self._peer.learned():
            for name, _ in self._targets:
                self._outgoing.workers(name, self.decoder, self._ranks)
            for target in self._open():
                if target.pushes is None and target.phase is TargetPhase.SENDING:
                    self._plan(target)

    def _plan(self, target: PushTarget) -> None:
        """Give a target its plan, if the decoder is known by the generation that announced it."""
        if target.announce.generations[1] != self._peer.generation:
            return
        if self._peer.remote is None:
            target.close(self._peer.absent)
            return
        self._outgoing.workers(target.key.transfer_id, self.decoder, self._ranks)
        try:
            pushes = self._peer.remote.pushes(target.key.rank)
            if pushes:  # of a worker that is sent nothing kvd told no metadata
                self._lanes.check(target, self._peer.remote)
            target.pushes = pushes
        except (TopologyError, BackendError) as error:
            target.close(from_error(error, f"decoder {self.decoder} does not fit"))

    def _answered(self, item: DecoderAnswered) -> None:
        """Whoever waits for that generation has it now, or never will."""
        self._asked = None
        self._follow()
        why = item.cause or self._peer.of(item.generation, "the announcement is")
        for target in self._open():
            if (
                isinstance(why, Cause)
                and target.pushes is None
                and target.announce.generations[1] == item.generation
            ):
                target.close(why)

    def _part(self, generation: str) -> None:
        """The decoder as it was is no more: nobody waits for what it was owed."""
        self._lanes.leave()
        for name, target in list(self._targets.items()):
            if target.announce.generations[1] in ("", generation):
                self._outgoing.decoder_gone(name[0], self.decoder)
                del self._targets[name]
        self._live = [t for t in self._live if (t.key.transfer_id, t.key.rank) in self._targets]

    # --- what goes out ---

    def _release(self, target: PushTarget) -> None:
        target.release()
        self._outgoing.settled(target.key.transfer_id, self.decoder, target.key.rank)

    def _tell(self, target: PushTarget) -> None:
        target.news = False
        key, layers = target.key, dict(target.unacknowledged)
        future = self._context.session().deliver(
            f"push {key.transfer_id} {key.decoder} {key.rank} {key.attempt}",
            progress(target, self._context.rank),
            max(LEAST_KEPT, target.deadline - time.monotonic()),
        )
        future.add_done_callback(functools.partial(self._told, target, layers))

    def _told(self, target: PushTarget, layers: dict[str, int], done: Future[Message]) -> None:
        """On the session's thread."""
        error = done.exception()
        if error is None:
            self._thread.put_by(Acknowledged(target, layers, nobody=False))
        elif isinstance(error, RefusedByDaemon):
            self._thread.put(Acknowledged(target, {}, nobody=True))

    def _forget(self, now: float) -> None:
        for name in forgettable(self._targets, now):
            del self._targets[name]
