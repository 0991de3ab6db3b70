"""What one peer engine pushes here: a thread that announces blocks, counts what arrives, and gives up what does not.

The peer writes, and it alone knows what is under way. So a load that did not complete is reported only after every
source has said that it writes no more, or after the window was closed, which needs nobody's word. The other loads on a
closed window are announced anew on the next one, and all of them is written again. Where the backend has no windows
this side reads by itself (`kvd.worker.push.layer_reads`), and a load ends when its reads have.

As in `kvd.worker.pull.reader` a call into the backend may hang: what was never announced is ended by the watcher,
what was stays unreported until the call returns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from kvd.backends.errors import BackendError
from kvd.shown import logger
from kvd.topology.errors import TopologyError
from kvd.wire.agent import HeldPeer
from kvd.wire.frame import Message
from kvd.wire.miss import known_code
from kvd.wire.push import PushProgress
from kvd.worker.admission import AdmissionQueue
from kvd.worker.cause import SHUTTING_DOWN, Cause, from_error, refusal_code
from kvd.worker.context import WorkerContext
from kvd.worker.inbox_thread import InboxThread, Rounds
from kvd.worker.load import Load, overdue
from kvd.worker.orders import block_lists
from kvd.worker.peers.followed import FollowedPeer, GiveUp, PeerChanged
from kvd.worker.peers.held import Evict
from kvd.worker.push.announce import announce, push_key, withdraw
from kvd.worker.push.arrival import Arrival, ArrivalPhase, Part, expect
from kvd.worker.push.arrivals import Arrivals
from kvd.worker.push.layer_reads import layer_reads
from kvd.worker.push.window import Windows
from kvd.worker.watchdog import STUCK_AFTER, Activity, complain

log = logger(__name__)

QUIESCE_SECONDS = 2.0
"""How long the sources may take to say that they write no more."""
PROGRESS_FAST, PROGRESS_SLOW, FAST_FOR = 200e-6, 1e-3, 1.0
"""Seconds between two times of having the window progress: quick while something arrives, slower while nothing does."""
GENERATION_AGAIN = 0.05
"""Seconds before our own generation is looked for again; kvd names it when all workers are registered."""


@dataclass(frozen=True, slots=True)
class _Answered:
    """The prefiller's kvd answered an announcement, or it was given up."""

    arrival: Arrival
    attempt: int
    future: Future[Message]


@dataclass(frozen=True, slots=True)
class _Read:
    """A read by ourselves ended; ``complete`` are the parts of which it was the last."""

    arrival: Arrival
    load: Load
    complete: tuple[Part, ...]


_ReceiverWord = PeerChanged | Load | PushProgress | GiveUp | Evict | _Answered | _Read


class ReceiveThread:
    """The thread of what one peer engine pushes.

    `on_peer_changed`, `on_progress`, `load`, `give_up` and `stop` only put something into a queue and
    return. Each load ends once, in ``context.ends``, on this thread or the watcher's.
    """

    def __init__(self, engine_id: str, context: WorkerContext, read: Callable[[Load], None]) -> None:
        """Where this side reads by itself ``read`` begins a read on the peer's lane."""
        self.engine_id = engine_id
        self._context = context
        self._read = read
        self._admission = AdmissionQueue()
        self._peer = FollowedPeer(engine_id, context.topology, lambda remote: remote.plan)
        self._activity = Activity()
        self._windows = Windows(engine_id, context.backend, self._activity)
        self._arrivals = Arrivals(engine_id, context, self._admission, self._windows)
        self._next = math.inf
        self._lively = 0.0
        rounds = Rounds(self._pause, self._take, self._turn, self._end_all, self._finish)
        self._thread = InboxThread(f"kvd-push-{engine_id[:12]}", f"what {engine_id} pushes", rounds)

    def on_peer_changed(self) -> None:
        """Another generation of the peer is registered, or none; loads from the one before are misses."""
        self._thread.put(PeerChanged())

    def begin(self, load: Load) -> None:
        """Have one request's KV pushed."""
        if not self._admission.put(load, self._thread.put):
            self._context.ends.refuse(load, SHUTTING_DOWN)

    def on_progress(self, progress: PushProgress) -> None:
        """A prefilling worker's word. One about a transfer that is not on its way is no error."""
        self._thread.put(progress)

    def give_up(self, load: Load) -> None:
        """Make a load that was given here a miss, for the reason that it names as ``dropped``, if it has not ended."""
        self._thread.put(GiveUp(load))

    def evict(self, order: Evict) -> None:
        """Close the window and what could not be closed before; the next load opens another one."""
        self._thread.put(order)

    def held(self) -> list[HeldPeer]:
        """The windows that the peer may write into, as they are just now; called on any thread."""
        arrivals = self._arrivals.held
        loading = sum(arrival.expected.bytes for arrival in arrivals)
        return self._windows.held(self._peer.generation, len(arrivals) + len(self._admission), loading)

    def stop(self) -> None:
        """Give up whatever is on the way, close the window, end the thread: begin all that."""
        self._admission.stop()
        self._thread.stop()

    def join(self, timeout: float) -> bool:
        """Wait for the end after `stop`. False where the peer may still write."""
        return self._thread.join(timeout) and not self._windows.unclosed

    # --- the watcher's thread ---

    def watch(self, now: float) -> float:
        """End what was never announced and whose time is up; complain of what was and is stuck.

        Gives the time.monotonic() at which to look again, infinity where nothing is held.
        """
        patience = STUCK_AFTER + QUIESCE_SECONDS
        held = self._arrivals.held
        stuck = [a.load for a in held if a.announced and now > a.load.deadline + patience]
        for load in stuck:
            complain(load, now, self.engine_id, self._activity.now)
        why = f"the thread of what peer {self.engine_id} pushes is busy {self._activity.now or 'with other loads'}"
        for load in self._admission.acquire_all() if stuck else self._admission.acquire_late(now):
            self._decline(load)
            late = f"not announced within its {load.seconds:.1f} s: {why}"
            self._context.ends.refuse(load, Cause(late, "TOO_LATE"))
        looks = [max(a.load.deadline + patience, a.load.complain_at) for a in held]
        return min([*self._admission.deadlines, *looks], default=math.inf)

    # --- the thread ---

    def _finish(self) -> None:
        self._arrivals.end_all(SHUTTING_DOWN)
        while self._arrivals:  # reads of our own that are still under way; the lanes end them
            word = self._thread.next_word()
            if isinstance(word, _Read):
                word.arrival.reading.discard(word.load)
                self._arrivals.end_settled()
        self._arrivals.retry_close(math.inf)
        for load in self._admission.acquire_all():
            self._context.ends.refuse(load, SHUTTING_DOWN)

    def _end_all(self, error: Exception) -> None:
        """A round failed, whatever of it was done."""
        self._next = 0.0
        self._arrivals.end_all(from_error(error, "unexpected error among the arrivals"))

    def _turn(self) -> None:
        now = time.monotonic()
        if now >= self._next:
            for arrival in self._arrivals.all:
                if self._arrivals.has(arrival):
                    self._look(arrival, now)
            self._arrivals.retry_close(now)
            dues = [*self._windows.unclosed.due, *(self._due(arrival) for arrival in self._arrivals.all)]
            self._next = min(dues, default=math.inf)
        if self._arrivals:
            self._windows.progress()

    def _pause(self) -> float | None:
        now = time.monotonic()
        pause = max(0.0, self._next - now)
        if self._arrivals and self._windows.possible:
            pause = min(pause, PROGRESS_FAST if now - self._lively < FAST_FOR else PROGRESS_SLOW)
        return pause if math.isfinite(pause) else None

    def _due(self, arrival: Arrival) -> float:
        """When to look at it again if nothing is heard of it."""
        if not arrival.cause:
            return min(arrival.load.deadline, arrival.due)
        return arrival.withdrawn + QUIESCE_SECONDS if self._windows.possible else math.inf

    def _take(self, word: _ReceiverWord) -> None:
        self._next = 0.0
        if isinstance(word, PushProgress):
            self._progress(word)
        elif isinstance(word, Load):
            self._start(word)
        elif isinstance(word, PeerChanged):
            self._follow()
        elif isinstance(word, Evict):
            self._evict(word)
        elif isinstance(word, _Answered):
            self._answered(word)
        elif isinstance(word, _Read):
            self._was_read(word)
        else:
            self._drop(word)

    def _follow(self) -> None:
        """Go by the peer as it is registered now. Nobody of one that is gone can say that it writes no more."""
        if why := self._peer.parted():
            self._arrivals.end_all(why)
        self._peer.learned()

    def _evict(self, order: Evict) -> None:
        """Close the window; where something is to arrive, only for a cause."""
        self._arrivals.retry_close(math.inf)
        if not order.concerns(self._peer.generation):
            return
        if order.cause is not None:
            self._arrivals.end_all(order.cause)
        elif not self._arrivals:
            self._arrivals.drop_window()

    # --- loads ---

    def _start(self, load: Load) -> None:
        if not self._admission.holds(load):
            return  # the watcher has ended it, or it was dropped
        self._follow()
        order = load.order
        remote = self._peer.of(order.prefill.generation, "the push was asked")
        if isinstance(remote, Cause):
            self._refuse(load, remote)
        elif not self._arrivals.name(order.transfer_id):
            before = f"transfer {order.transfer_id} was announced before: an id is for one prefill only"
            self._refuse(load, Cause(before, "BAD_PARAMS"))
        else:
            began = time.monotonic()
            try:
                load.pieces.local = block_lists(order.groups)
                expected = expect(remote.plan, load.pieces.local, order.tokens)
            except Exception as error:
                if not isinstance(error, TopologyError):
                    log.exception("plan for the load of %s", order.request_id)
                self._refuse(load, from_error(error))
            else:
                key = push_key(self._context, order.transfer_id, order.prefill)
                self._arrivals.take_up(Arrival(load, remote.plan, expected, key), began)

    def _refuse(self, load: Load, cause: Cause) -> None:
        if self._admission.acquire(load):
            self._decline(load)
            self._context.ends.refuse(load, cause)

    def _decline(self, load: Load) -> None:
        """It will not be announced: its prefiller need not keep blocks. Not where another request has that id."""
        order = load.order
        if self._arrivals.find(order.transfer_id) is None:
            key = push_key(self._context, order.transfer_id, order.prefill)
            withdraw(self._context.session(), key, order.prefill.generation)

    def _look(self, arrival: Arrival, now: float) -> None:
        """Do what is due for an arrival."""
        if arrival.cause:
            if self._arrivals.settled(arrival):
                self._arrivals.end(arrival, arrival.cause)
            elif self._windows.possible and now >= arrival.withdrawn + QUIESCE_SECONDS:
                self._arrivals.drop_window()
        elif why := arrival.struck(self._context.topology.worker):
            self._arrivals.give_up(arrival, why)
        elif not arrival.left and not arrival.reading:
            self._arrivals.end(arrival, None)
        elif late := overdue(arrival.load, "complete"):
            self._arrivals.give_up(arrival, late)
        elif now >= arrival.due:
            self._announce(arrival, now)

    def _announce(self, arrival: Arrival, now: float) -> None:
        session, patience = self._context.session(), self._context.settings.handshake_timeout
        generation = session.state.engine_generation
        left = min(arrival.load.deadline, arrival.began + patience) - now
        if not generation:
            arrival.put_off(now + GENERATION_AGAIN)
            if left <= 0:
                incomplete = "kvd misses workers of this engine, so its blocks cannot be announced"
                self._arrivals.give_up(arrival, Cause(incomplete, "PEER_AWAY"))
            return
        try:
            self._windows.open()
        except BackendError as error:
            self._arrivals.give_up(arrival, from_error(error, f"peer {self.engine_id} cannot write here"))
            return
        if not arrival.announced and not self._arrivals.acquire(arrival):
            return
        arrival.sent(self._windows.number, now)
        self._lively = now
        attempt = arrival.key.attempt
        asked = announce(session, arrival, generation, self._windows.metadata, left)
        asked.add_done_callback(lambda future: self._thread.put(_Answered(arrival, attempt, future)))

    def _answered(self, word: _Answered) -> None:
        arrival = word.arrival
        if not self._current(arrival, word.attempt) or arrival.cause:
            return
        error = word.future.exception()
        if error is None:
            arrival.acknowledged(time.monotonic())
        elif arrival.phase is ArrivalPhase.ANNOUNCED:
            refused = f"prefiller {self.engine_id} did not take the announcement: {error}"
            self._arrivals.give_up(arrival, Cause(refused, refusal_code(error)))

    def _progress(self, progress: PushProgress) -> None:
        key, source = progress.key, progress.source
        arrival = self._arrivals.find(key.transfer_id)
        if arrival is None or not arrival.exposed or not self._current(arrival, key.attempt):
            return
        asked = arrival.key
        if (key.decoder, key.rank, key.prefiller_endpoint) != (
            asked.decoder,
            asked.rank,
            asked.prefiller_endpoint,
        ):
            return  # kvd compares the endpoint with the host that speaks
        now = self._lively = time.monotonic()
        arrival.acknowledged(now)
        arrival.note_sent(progress)
        if self._windows.possible:
            for there in progress.there:
                arrival.mark_received(source, there.layers, now)
        elif not arrival.cause:
            self._fetch(arrival, progress)
        if progress.quiesced:
            arrival.mark_quiesced(source)
        name = f"prefiller {self.engine_id}/{source}"
        if progress.failed:
            self._arrivals.give_up(arrival, Cause(f"{name}: {progress.failed}", known_code(progress.code)))
            if not progress.quiesced:
                arrival.never_quiesces()
        elif progress.quiesced and any(rank == source for rank, _ in arrival.left):
            self._arrivals.give_up(arrival, Cause(f"{name} writes no more of it", "PREFILL_ENDED"))

    def _fetch(self, arrival: Arrival, progress: PushProgress) -> None:
        def ended(load: Load, complete: tuple[Part, ...]) -> None:
            self._thread.put(_Read(arrival, load, complete))

        remote = self._peer.remote
        if remote is None:
            return
        try:
            reads = layer_reads(arrival, remote, progress, self._context.settings.load_timeout, ended)
        except Exception as error:
            if not isinstance(error, TopologyError):
                log.exception("read of transfer %s", arrival.key.transfer_id)
            self._arrivals.give_up(arrival, from_error(error))
        else:
            for read in reads:
                self._read(read)

    def _was_read(self, word: _Read) -> None:
        word.arrival.end_read(word.load)
        if word.load.cause:
            self._arrivals.give_up(word.arrival, word.load.cause)
        else:
            for source, layer in word.complete:
                word.arrival.mark_received(source, (layer,), time.monotonic())

    def _drop(self, word: GiveUp) -> None:
        arrival = self._arrivals.find(word.load.order.transfer_id)
        if arrival is not None and arrival.load is word.load:
            self._arrivals.give_up(arrival, word.cause)
        else:
            self._refuse(word.load, word.cause)

    def _current(self, arrival: Arrival, attempt: int) -> bool:
        return self._arrivals.has(arrival) and arrival.key.attempt == attempt
