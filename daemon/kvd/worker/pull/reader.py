"""The way to one peer engine: a thread that owns a lane and all loads on it.

The thread is the only one that touches the backend for this peer, so a slow, stopped or dead peer holds up
nobody else. Its one rule: a load that did not complete is reported only after the lane was destroyed, because
only then can none of its bytes land in memory that vLLM is about to use again. The other loads on that lane
start over on a new one; reading again is harmless, the memory is still theirs.

A call into the backend may hang, and nothing can end it from outside. What the thread was given but has not
posted has no bytes on the way and is ended by the watcher when its time is up (`PeerLane.watch`). What was posted
stays unreported, whatever that costs, until the call returns; the watcher says so in the log.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvd.backends.contract import Backend, Lane, State, traits_of
from kvd.backends.errors import BackendError, BackendUnavailable, PeerMetadataError, RegistrationError
from kvd.client.cards import engine_geometry
from kvd.geometry.errors import GeometryError
from kvd.geometry.model import WorkerGeometry
from kvd.topology.errors import TopologyError
from kvd.topology.pieces import LEAST_BYTES
from kvd.wire.identity import EngineCard
from kvd.worker.cause import REQUEST_OVER, SHUTTING_DOWN, Cause, from_error
from kvd.worker.misses import hold_back
from kvd.worker.peers import Peer, connect, destroy, meet
from kvd.worker.probe import Probing, Told
from kvd.worker.pull.load import Load, apply_plan, clear_leftover, complain, look, overdue, post

log = logging.getLogger(__name__)

POLL_FAST, POLL_SLOW, FAST_FOR = 50e-6, 1e-3, 0.02
"""Seconds between polls: quick while a load is young, slower after; spinning would starve the transport."""
MAX_FAILURES = 3
HOPELESS = (PeerMetadataError, RegistrationError, BackendUnavailable, TopologyError)
"""What a new lane meets again: the peer's metadata, our own memory and a load's blocks stay what they are."""
DESTROY_AGAIN = 1.0
"""Seconds before a lane that could not be destroyed is tried again."""
STUCK_AFTER = 2.0
"""Seconds past its deadline after which a posted load that is still not over is called stuck."""


@dataclass(frozen=True, slots=True)
class _Gone:
    generation: str
    reason: str


@dataclass(frozen=True, slots=True)
class _GiveUp:
    load: Load


@dataclass(slots=True)
class _Unclosed:
    """A lane that could not be destroyed, and what was posted on it: none of that may be reported yet."""

    lane: Lane
    loads: list[tuple[Load, Cause | None]]
    again: float


class PeerLane:
    """The thread of one peer engine.

    `know`, `load`, `give_up`, `gone` and `stop` only put something into a queue and return. ``ended`` is called once
    for each load, on this thread or the watcher's. A load that is dropped ends where nothing of it is posted; what is
    posted runs on, since ending it would cost all others on this lane a new one.
    """

    def __init__(
        self,
        engine_id: str,
        backend: Backend,
        local: WorkerGeometry,
        siblings: tuple[WorkerGeometry, ...],
        ended: Callable[[Load], None],
        *,
        piece_bytes: int = LEAST_BYTES,
        probed: Told | None = None,
    ) -> None:
        """``probed`` is told of probes (`kvd.worker.probe`); without it there are none."""
        self.engine_id = engine_id
        self._backend = backend
        self._local = local
        self._siblings = siblings
        self._ended = ended
        self._piece_bytes = piece_bytes
        self._inbox: queue.Queue[EngineCard | Load | _GiveUp | _Gone | None] = queue.Queue()
        self._lock = threading.Lock()
        self._waiting: dict[int, Load] = {}  # nothing of them is posted
        self._stopped = False
        self._lane: Lane | None = None
        self._peer: Peer | None = None
        self._absent = Cause(f"peer {engine_id} is not known here", "PEER_REFUSED")
        self._due: list[Load] = []  # of the waiting, those that the next turns post
        self._active: list[Load] = []  # posted on the lane of now
        self._unclosed: list[_Unclosed] = []
        self._probing = Probing(engine_id, probed)
        self._doing = ""
        self._thread = threading.Thread(target=self._run, name=f"kvd-lane-{engine_id[:12]}", daemon=True)
        self._thread.start()

    def know(self, card: EngineCard) -> None:
        """The peer as it is now: plan and connect ahead of the first load."""
        self._inbox.put(card)

    def load(self, load: Load) -> None:
        """Read one request's KV."""
        with self._lock:
            stopped = self._stopped
            if not stopped:
                self._waiting[id(load)] = load
                self._inbox.put(load)
        if stopped:
            self._end(load, SHUTTING_DOWN)

    def give_up(self, load: Load) -> None:
        """Make a load that was given here a miss, for the reason that it names as ``dropped``, if it has not ended."""
        self._inbox.put(_GiveUp(load))

    def gone(self, generation: str, reason: str) -> None:
        """This generation of the peer ended: its loads are misses."""
        self._inbox.put(_Gone(generation, reason))

    def stop(self) -> None:
        """Give up whatever is on the way, destroy the lane, end the thread: begin all that."""
        with self._lock:
            self._stopped = True
        self._inbox.put(None)

    def join(self, timeout: float) -> bool:
        """Wait for the end after `stop`. False where the backend may still touch memory."""
        self._thread.join(max(0.0, timeout))
        return not self._thread.is_alive() and not self._unclosed

    # --- the watcher's thread ---

    def watch(self, now: float) -> float:
        """End what was never posted and whose time is up; complain of what was posted and is stuck.

        Gives the time.monotonic() at which to look again, infinity where nothing is held.
        """
        with self._lock:
            posted = [
                *self._active,
                *(load for unclosed in list(self._unclosed) for load, _ in unclosed.loads),
            ]
            stuck = [load for load in posted if now > load.deadline + STUCK_AFTER]
            late = [load for load in self._waiting.values() if stuck or now > load.deadline]
            for load in late:
                del self._waiting[id(load)]
            waiting = list(self._waiting.values())
        for load in stuck:
            complain(load, now, self.engine_id, self._doing)
        why = f"the thread of peer {self.engine_id} is busy {self._doing or 'with other loads'}"
        for load in late:
            late_by = f"not begun within its {load.deadline - load.received:.1f} s"
            self._end(load, Cause(f"{late_by}: {why}", "TOO_LATE"))
        looks = [load.deadline for load in waiting]
        looks += [max(load.deadline + STUCK_AFTER, load.complain_at) for load in posted]
        return min(looks, default=math.inf)

    # --- the thread ---

    def _run(self) -> None:
        open_ = True
        while open_:
            try:
                open_ = self._turn()
            except Exception as error:  # the thread must outlive any single load
                log.exception("lane to %s: unexpected error", self.engine_id)
                self._drop_lane(self._active, from_error(error, "unexpected error in the lane"))
        self._drop_lane(self._active, SHUTTING_DOWN)
        self._bury(math.inf)
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
        for load in waiting:
            self._end(load, SHUTTING_DOWN)

    def _turn(self) -> bool:
        try:
            message = self._inbox.get(timeout=self._pause())
        except queue.Empty:
            pass
        else:
            if message is None:
                return False
            self._take(message)
        self._post_next()
        self._poll()
        self._probe()
        self._bury(time.monotonic())
        return True

    def _pause(self) -> float | None:
        if self._due:
            return 0.0
        if not self._active and not self._probing.on:
            return DESTROY_AGAIN if self._unclosed else None
        youngest = max([load.posted for load in self._active] + [self._probing.posted])
        return POLL_FAST if time.monotonic() - youngest < FAST_FOR else POLL_SLOW

    def _take(self, message: EngineCard | Load | _GiveUp | _Gone) -> None:
        if isinstance(message, EngineCard):
            self._learn(message)
        elif isinstance(message, _GiveUp):
            if message.load in self._active:
                self._give_up(message.load, message.load.dropped or REQUEST_OVER)
            else:
                self._refuse(message.load, message.load.dropped or REQUEST_OVER)
        elif isinstance(message, _Gone):
            if self._peer is not None and self._peer.card.generation == message.generation:
                self._part(Cause(f"peer {self.engine_id} is gone: {message.reason}", "PEER_GONE"))
        elif id(message) in self._waiting:
            self._start(message)

    def _learn(self, card: EngineCard) -> None:
        if self._peer is not None and self._peer.card.generation == card.generation:
            return
        if self._peer is not None:
            restarted = f"peer {self.engine_id} restarted as generation {card.generation}"
            self._part(Cause(restarted, "PEER_GONE"))
        try:
            peer = meet(card, self._local, self._siblings)
        except (GeometryError, TopologyError) as error:
            self._absent = from_error(error, f"peer {self.engine_id} does not fit")
            log.error("%s", self._absent)  # noqa: TRY400 - the message says it all
            return
        self._peer = peer
        try:
            lane = self._open_lane()
        except BackendError as error:
            log.warning("lane to %s: %s; it will be tried again with the first load", self.engine_id, error)
            return
        with self._busy("probing"):
            if not self._waiting and self._probing.begin(peer, lane):  # a load that waits is as good a probe
                self._drop_lane()

    def _probe(self) -> None:
        """Go on with the probe. The lane of one that went wrong is dropped: nothing is known of its bytes."""
        if self._lane is None or not self._probing.on:
            return
        with self._busy("probing"):
            failed = self._probing.look(self._lane, alone=not self._active and not self._due)
        if failed and not self._active:  # else its loads tell what the lane is worth
            self._drop_lane()

    def _part(self, why: Cause) -> None:
        """This generation of the peer is over: so are its loads, and the lane that its metadata went into."""
        self._peer, self._absent = None, why
        due, self._due = self._due, []
        for load in (*self._active, *due):
            load.lost = True
        self._drop_lane(self._active, why)
        for load in due:
            self._refuse(load, why)

    def _start(self, load: Load) -> None:
        peer, generation = self._peer, load.order.prefill.generation
        if peer is None:
            self._refuse(load, self._absent)
        elif generation != peer.card.generation:
            self._refuse(
                load,
                Cause(
                    f"peer {self.engine_id} is generation {peer.card.generation} now, the blocks are of generation"
                    f" {generation}",
                    "PEER_GONE",
                ),
            )
        else:
            try:
                if load.plan is None:
                    traits = traits_of(self._backend, self._lane)
                    apply_plan(load, peer.plan, traits, piece_bytes=self._piece_bytes)
                if load.fault is not None and load.fault.when == "layers":
                    remotes = engine_geometry(peer.card).workers
                    hold_back(load, load.fault, self._local, self._siblings, remotes)
            except Exception as error:
                if not isinstance(error, TopologyError):
                    log.exception("plan for the load of %s", load.order.request_id)
                self._refuse(load, from_error(error))
            else:
                self._due.append(load)

    def _claim(self, load: Load, *, post: bool) -> bool:
        """Whether a waiting load is still ours to post or to end: the watcher may have ended it."""
        with self._lock:
            mine = self._waiting.pop(id(load), None) is not None
            if mine and post:
                self._active.append(load)
        return mine

    def _refuse(self, load: Load, cause: Cause) -> None:
        if self._claim(load, post=False):
            self._end(load, cause)

    def _post_next(self) -> None:
        if not self._due or self._peer is None:
            return
        load = self._due.pop(0)
        if why := load.dropped or overdue(load, "posted"):
            self._refuse(load, why)
            return
        if not self._claim(load, post=True):
            return
        for slice_ in load.slices[load.whole :]:
            slice_.transfers = []
        try:
            lane = self._open_lane()
            with self._busy("posting"):
                clear_leftover(load, self._peer.plan, self._local)
                post(load, lane, self._peer.plan, traits_of(self._backend, lane))
        except HOPELESS as error:
            self._give_up(load, from_error(error))
        except BackendError as error:
            self._failed(load, error.message)
        except Exception as error:  # a part of it may be posted, so the lane goes; the other loads start over
            log.exception("posting the load of %s", load.order.request_id)
            self._drop_lane([load], from_error(error))
        else:
            if load.fault is not None and load.fault.when == "flight":
                self._give_up(load, load.fault.cause)

    def _poll(self) -> None:
        for load in list(self._active):
            if load not in self._active or self._lane is None:
                continue  # ended, or to be posted again, together with another load of this turn
            with self._busy("polling"):
                state, reason = look(load, self._lane)
            late = overdue(load, "complete")
            if state is State.DONE and load.fault is not None and not late:
                self._give_up(load, load.fault.cause)
            elif state is State.DONE:
                self._active.remove(load)
                # What was read too late is nothing to rely on: its lease may have ended.
                self._end(load, late)
            elif late:
                self._give_up(load, late)
            elif state is State.FAILED:
                self._failed(load, reason)

    def _failed(self, load: Load, reason: str) -> None:
        """A load failed: again on a new lane while its time allows, else a miss."""
        load.failures += 1
        if load.failures < MAX_FAILURES and time.monotonic() < load.deadline:
            request, peer = load.order.request_id, self.engine_id
            log.info("load of %s from %s failed (%s); trying again on a new lane", request, peer, reason)
            self._drop_lane()
        else:
            self._give_up(load, Cause(reason, "TRANSFER_FAILED"))

    def _give_up(self, load: Load, cause: Cause) -> None:
        """End a posted load as a miss; where bytes may be on the way, after the lane is gone."""
        if load.transfers:
            self._drop_lane([load], cause)
        else:
            self._active.remove(load)
            self._end(load, cause)

    def _drop_lane(self, ending: Sequence[Load] = (), cause: Cause | None = None) -> None:
        """Destroy the lane, then end ``ending``; all others that were on it start over on a new one."""
        lane, self._lane = self._lane, None
        self._probing.stop()
        rest = [load for load in self._active if load not in ending]
        ends: list[tuple[Load, Cause | None]] = [(load, cause) for load in ending]
        error = self._destroy(lane) if lane is not None else ""
        with self._lock:
            if lane is not None and error:
                # Whatever was posted on it may still be written: nothing of it may be reported or posted again.
                held = [*ends, *((load, Cause(error, "TRANSFER_FAILED")) for load in rest)]
                self._unclosed.append(_Unclosed(lane, held, time.monotonic() + DESTROY_AGAIN))
                ends, rest = [], []
            self._active = []
            self._waiting.update((id(load), load) for load in rest)
        self._due = [*rest, *self._due]
        for load, why in ends:
            self._end(load, why)

    def _destroy(self, lane: Lane) -> str:
        with self._busy("destroying its lane"):
            return destroy(lane, self.engine_id)

    def _bury(self, now: float) -> None:
        """Try again to destroy what could not be destroyed, and end the loads that wait for it."""
        for unclosed in [u for u in self._unclosed if now >= u.again]:
            if self._destroy(unclosed.lane):
                unclosed.again = time.monotonic() + DESTROY_AGAIN
                continue
            self._unclosed.remove(unclosed)
            for load, cause in unclosed.loads:
                self._end(load, cause)

    def _end(self, load: Load, cause: Cause | None) -> None:
        load.cause = cause
        load.ended = time.monotonic()
        try:
            self._ended(load)
        except Exception:  # of whoever is told; the lane's thread has other loads to end
            log.exception("end of the load of %s from %s", load.order.request_id, self.engine_id)

    def _open_lane(self) -> Lane:
        if self._lane is None:
            if self._peer is None:
                raise BackendError(self._absent.text)
            with self._busy("connecting"):
                self._lane = connect(self._backend, self._peer)
        return self._lane

    @contextmanager
    def _busy(self, doing: str) -> Iterator[None]:
        """Say what the thread does in the backend, for the watcher."""
        before, self._doing = self._doing, doing
        try:
            yield
        finally:
            self._doing = before
