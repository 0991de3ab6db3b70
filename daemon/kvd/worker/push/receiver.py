"""What one peer engine pushes here: a thread that announces blocks, counts what arrives, and gives up what does not.

The peer writes, and it alone knows what is under way. So a load that did not complete is reported only after every
source has said that it writes no more, or after the window was closed, which needs nobody's word. The other loads on a
closed window are announced anew on the next one, and all of them is written again. Where the backend has no windows
this side reads by itself (`kvd.worker.push.layer_reads`), and a load ends when its reads have.

As in `kvd.worker.pull.reader` a call into the backend may hang: what was never announced is ended by the watcher,
what was stays unreported until the call returns.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from kvd.backends.errors import BackendError
from kvd.client.cards import engine_geometry
from kvd.geometry.errors import GeometryError
from kvd.topology.errors import TopologyError
from kvd.wire.frame import Message
from kvd.wire.identity import EngineCard
from kvd.wire.miss import known_code
from kvd.wire.push import PushProgress
from kvd.worker.cause import REQUEST_OVER, SHUTTING_DOWN, Cause, from_error, refusal_code
from kvd.worker.misses import strikes
from kvd.worker.peers import Peer, meet
from kvd.worker.pull.load import Load, complain
from kvd.worker.pull.reader import STUCK_AFTER
from kvd.worker.push.admission import Intake
from kvd.worker.push.announce import Here, announce, push_key, withdraw
from kvd.worker.push.arrival import Arrival, Part, expect
from kvd.worker.push.arrivals import Underway
from kvd.worker.push.layer_reads import Fetching
from kvd.worker.push.window import Windows

log = logging.getLogger(__name__)

QUIET_SECONDS = 2.0
"""How long the sources may take to say that they write no more."""
SERVE_FAST, SERVE_SLOW, FAST_FOR = 200e-6, 1e-3, 1.0
"""Seconds between two turns of serving the window: quick while something arrives, slower while nothing does."""
GENERATION_AGAIN = 0.05
"""Seconds before our own generation is looked for again; kvd names it when all workers are registered."""


@dataclass(frozen=True, slots=True)
class _Gone:
    generation: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Dropped:
    load: Load


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


_Word = EngineCard | Load | PushProgress | _Gone | _Dropped | _Answered | _Read


class PeerArrivals:
    """The thread of what one peer engine pushes.

    `know`, `load`, `progress`, `drop`, `gone` and `stop` only put something into a queue and return. Each load ends
    once, by ``here.ended`` or ``here.refused``, on this thread or the watcher's.
    """

    def __init__(self, engine_id: str, here: Here) -> None:
        self.engine_id = engine_id
        self._here = here
        self._inbox: queue.Queue[_Word | None] = queue.Queue()
        self._intake = Intake()
        self._peer: Peer | None = None
        self._fetching: Fetching | None = None
        self._absent = Cause(f"peer {engine_id} is not known here", "PEER_REFUSED")
        self._windows = Windows(engine_id, here.backend, self._busy)
        self._underway = Underway(engine_id, here, self._intake, self._windows)
        self._next = math.inf
        self._lively = 0.0
        self._doing = ""
        self._thread = threading.Thread(target=self._run, name=f"kvd-push-{engine_id[:12]}", daemon=True)
        self._thread.start()

    def know(self, card: EngineCard) -> None:
        """The peer as it is now."""
        self._inbox.put(card)

    def load(self, load: Load) -> None:
        """Have one request's KV pushed."""
        if not self._intake.put(load, self._inbox.put):
            self._here.refused(load, SHUTTING_DOWN)

    def progress(self, progress: PushProgress) -> None:
        """A prefilling worker's word. One about a transfer that is not on its way is no error."""
        self._inbox.put(progress)

    def drop(self, load: Load) -> None:
        """Nobody waits for this load any more: give it up, for the reason that it names."""
        self._inbox.put(_Dropped(load))

    def gone(self, generation: str, reason: str) -> None:
        """This generation of the peer ended: its loads are misses."""
        self._inbox.put(_Gone(generation, reason))

    def stop(self) -> None:
        """Give up whatever is on the way, close the window, end the thread: begin all that."""
        self._intake.stop()
        self._inbox.put(None)

    def join(self, timeout: float) -> bool:
        """Wait for the end after `stop`. False where the peer may still write."""
        self._thread.join(max(0.0, timeout))
        return not self._thread.is_alive() and not self._windows.due

    # --- the watcher's thread ---

    def watch(self, now: float) -> float:
        """End what was never announced and whose time is up; complain of what was and is stuck.

        Gives the time.monotonic() at which to look again, infinity where nothing is held.
        """
        patience = STUCK_AFTER + QUIET_SECONDS
        held = self._underway.held
        stuck = [a.load for a in held if a.announced and now > a.load.deadline + patience]
        for load in stuck:
            complain(load, now, self.engine_id, self._doing)
        why = f"the thread of what peer {self.engine_id} pushes is busy {self._doing or 'with other loads'}"
        for load in self._intake.claim_late(now, everything=bool(stuck)):
            self._decline(load)
            late = f"not announced within its {load.deadline - load.received:.1f} s: {why}"
            self._here.refused(load, Cause(late, "TOO_LATE"))
        looks = [max(a.load.deadline + patience, a.load.complain_at) for a in held]
        return min([*self._intake.deadlines, *looks], default=math.inf)

    # --- the thread ---

    def _run(self) -> None:
        open_ = True
        while open_:
            try:
                open_ = self._turn()
            except Exception as error:  # the thread must outlive any single load
                log.exception("what %s pushes: unexpected error", self.engine_id)
                self._next = 0.0
                self._underway.end_all(from_error(error, "unexpected error among the arrivals"))
        self._underway.end_all(SHUTTING_DOWN)
        while self._underway:  # reads of our own that are still under way; the lanes end them
            word = self._inbox.get()
            if isinstance(word, _Read):
                word.arrival.reading.discard(word.load)
                self._underway.end_settled()
        self._underway.retry_close(math.inf)
        for load in self._intake.claim_late(math.inf):
            self._here.refused(load, SHUTTING_DOWN)

    def _turn(self) -> bool:
        heard = False
        try:
            word = self._inbox.get(timeout=self._pause(time.monotonic()))
            while word is not None:
                heard = True
                self._take(word)
                word = self._inbox.get_nowait()
            return False
        except queue.Empty:
            pass
        now = time.monotonic()
        if heard or now >= self._next:
            for arrival in self._underway.all:
                if self._underway.has(arrival):
                    self._look(arrival, now)
            self._underway.retry_close(now)
            dues = [*self._windows.due, *(self._due(arrival) for arrival in self._underway.all)]
            self._next = min(dues, default=math.inf)
        if self._underway:
            self._windows.progress()
        return True

    def _pause(self, now: float) -> float | None:
        pause = max(0.0, self._next - now)
        if self._underway and self._windows.possible:
            pause = min(pause, SERVE_FAST if now - self._lively < FAST_FOR else SERVE_SLOW)
        return pause if math.isfinite(pause) else None

    def _due(self, arrival: Arrival) -> float:
        """When to look at it again if nothing is heard of it."""
        if not arrival.cause:
            return min(arrival.load.deadline, arrival.due)
        return arrival.withdrawn + QUIET_SECONDS if self._windows.possible else math.inf

    def _take(self, word: _Word) -> None:
        if isinstance(word, PushProgress):
            self._progress(word)
        elif isinstance(word, Load):
            self._start(word)
        elif isinstance(word, EngineCard):
            self._learn(word)
        elif isinstance(word, _Answered):
            self._answered(word)
        elif isinstance(word, _Read):
            self._was_read(word)
        elif isinstance(word, _Dropped):
            self._drop(word)
        elif self._peer is not None and self._peer.card.generation == word.generation:
            self._part(Cause(f"peer {self.engine_id} is gone: {word.reason}", "PEER_GONE"))

    # --- the peer ---

    def _learn(self, card: EngineCard) -> None:
        if self._peer is not None and self._peer.card.generation == card.generation:
            return
        if self._peer is not None:
            restarted = f"peer {self.engine_id} restarted as generation {card.generation}"
            self._part(Cause(restarted, "PEER_GONE"))
        here = self._here
        try:
            self._peer = meet(card, here.local, here.siblings)
        except (GeometryError, TopologyError) as error:
            self._absent = from_error(error, f"peer {self.engine_id} does not fit")
            return
        if not self._windows.possible:
            remotes = engine_geometry(card).workers
            self._fetching = Fetching(here.local, here.siblings, remotes, here.read, here.read_seconds)

    def _part(self, why: Cause) -> None:
        """This generation of the peer is over, and nobody is there to say that it writes no more."""
        self._peer, self._absent = None, why
        self._underway.end_all(why)

    # --- loads ---

    def _start(self, load: Load) -> None:
        if not self._intake.holds(load):
            return  # the watcher has ended it, or it was dropped
        peer, order = self._peer, load.order
        if peer is None:
            self._refuse(load, self._absent)
        elif order.prefill.generation != peer.card.generation:
            generations = f"generation {peer.card.generation} now, the push was asked of generation"
            other = f"peer {self.engine_id} is {generations} {order.prefill.generation}"
            self._refuse(load, Cause(other, "PEER_GONE"))
        elif not self._intake.name(order.transfer_id):
            before = f"transfer {order.transfer_id} was announced before: an id is for one prefill only"
            self._refuse(load, Cause(before, "BAD_PARAMS"))
        else:
            began = time.monotonic()
            try:
                load.local = order.block_lists()
                expected = expect(peer.plan, load.local, order.tokens)
            except Exception as error:
                if not isinstance(error, TopologyError):
                    log.exception("plan for the load of %s", order.request_id)
                self._refuse(load, from_error(error))
            else:
                key = push_key(self._here.engine_id, self._here.rank, order.transfer_id, order.prefill)
                self._underway.take_up(Arrival(load, peer.plan, expected, key), began)

    def _refuse(self, load: Load, cause: Cause) -> None:
        if self._intake.claim(load):
            self._decline(load)
            self._here.refused(load, cause)

    def _decline(self, load: Load) -> None:
        """It will not be announced: its prefiller need not keep blocks. Not where another request has that id."""
        here, order = self._here, load.order
        if self._underway.find(order.transfer_id) is None:
            key = push_key(here.engine_id, here.rank, order.transfer_id, order.prefill)
            withdraw(here.session, key, order.prefill.generation)

    def _look(self, arrival: Arrival, now: float) -> None:
        """Do what is due for an arrival."""
        if arrival.cause:
            if self._underway.settled(arrival):
                self._underway.end(arrival, arrival.cause)
            elif self._windows.possible and now >= arrival.withdrawn + QUIET_SECONDS:
                self._underway.drop_window()
        elif (fault := arrival.load.fault) is not None and strikes(fault, arrival, self._here.local):
            self._underway.give_up(arrival, fault.cause)
        elif not arrival.left and not arrival.reading:
            self._underway.end(arrival, None)
        elif now > arrival.load.deadline:
            self._underway.give_up(
                arrival,
                Cause(
                    f"not complete within its {arrival.load.deadline - arrival.load.received:.1f} s",
                    "TOO_LATE",
                ),
            )
        elif now >= arrival.due:
            self._announce(arrival, now)

    def _announce(self, arrival: Arrival, now: float) -> None:
        here, generation = self._here, self._here.session.state.engine_generation
        left = min(arrival.load.deadline, arrival.began + here.announce_seconds) - now
        if not generation:
            arrival.due = now + GENERATION_AGAIN
            if left <= 0:
                self._underway.give_up(
                    arrival,
                    Cause(
                        "kvd misses workers of this engine, so its blocks cannot be announced", "PEER_AWAY"
                    ),
                )
            return
        try:
            self._windows.open()
        except BackendError as error:
            self._underway.give_up(arrival, from_error(error, f"peer {self.engine_id} cannot write here"))
            return
        if not arrival.announced and not self._underway.claim(arrival):
            return
        arrival.sent(self._windows.number, now)
        self._lively = now
        attempt = arrival.key.attempt
        asked = announce(here.session, arrival, generation, self._windows.metadata, left)
        asked.add_done_callback(lambda future: self._inbox.put(_Answered(arrival, attempt, future)))

    def _answered(self, word: _Answered) -> None:
        arrival = word.arrival
        if not self._current(arrival, word.attempt) or arrival.cause:
            return
        error = word.future.exception()
        if error is None:
            arrival.heard(time.monotonic())
        elif not arrival.taken:
            self._underway.give_up(
                arrival,
                Cause(
                    f"prefiller {self.engine_id} did not take the announcement: {error}", refusal_code(error)
                ),
            )

    def _progress(self, progress: PushProgress) -> None:
        key, source = progress.key, progress.source
        arrival = self._underway.find(key.transfer_id)
        if arrival is None or not arrival.asked or not self._current(arrival, key.attempt):
            return
        if (key.decoder, key.rank) != (arrival.key.decoder, arrival.key.rank):
            return
        now = self._lively = time.monotonic()
        arrival.heard(now)
        arrival.told(progress)
        if self._fetching is None:
            for there in progress.there:
                arrival.tick(source, there.layers, now)
        elif not arrival.cause:
            self._fetch(arrival, progress)
        if progress.quiet:
            arrival.quiet.add(source)
        name = f"prefiller {self.engine_id}/{source}"
        if progress.failed:
            self._underway.give_up(arrival, Cause(f"{name}: {progress.failed}", known_code(progress.code)))
            if not progress.quiet:
                arrival.withdrawn = -math.inf  # the source cannot tell what may still land, and never will
        elif progress.quiet and any(rank == source for rank, _ in arrival.left):
            self._underway.give_up(arrival, Cause(f"{name} writes no more of it", "PREFILL_ENDED"))

    def _fetch(self, arrival: Arrival, progress: PushProgress) -> None:
        def ended(load: Load, complete: tuple[Part, ...]) -> None:
            self._inbox.put(_Read(arrival, load, complete))

        try:
            if self._fetching is not None:
                self._fetching.fetch(arrival, progress.source, progress.there, ended)
        except Exception as error:
            if not isinstance(error, TopologyError):
                log.exception("read of transfer %s", arrival.key.transfer_id)
            self._underway.give_up(arrival, from_error(error))

    def _was_read(self, word: _Read) -> None:
        word.arrival.reading.discard(word.load)
        word.arrival.backend = next((t.backend for t in word.load.transfers if t.backend), "")
        if word.load.cause:
            self._underway.give_up(word.arrival, word.load.cause)
        else:
            for source, layer in word.complete:
                word.arrival.tick(source, (layer,), time.monotonic())

    def _drop(self, word: _Dropped) -> None:
        arrival = self._underway.find(word.load.order.transfer_id)
        if arrival is not None and arrival.load is word.load:
            self._underway.give_up(arrival, word.load.dropped or REQUEST_OVER)
        else:
            self._refuse(word.load, word.load.dropped or REQUEST_OVER)

    def _current(self, arrival: Arrival, attempt: int) -> bool:
        return self._underway.has(arrival) and arrival.key.attempt == attempt

    @contextmanager
    def _busy(self, doing: str) -> Iterator[None]:
        """Say what the thread does in the backend, for the watcher."""
        before, self._doing = self._doing, doing
        try:
            yield
        finally:
            self._doing = before
