"""The way to one peer engine: a thread that owns a lane and all loads on it.

The thread touches the backend for this peer, and nobody else but a step that posts its own load and looks for it
(`begin_now`). So a slow, stopped or dead peer holds up nobody. Its one rule: a load that did not complete is reported
only after the lane was destroyed, because only then can none of its bytes land in memory that vLLM is about to use
again. The other loads on that lane start over on a new one; reading again is harmless, the memory is still theirs.

A call into the backend may hang, and nothing can end it from outside. What the thread was given but has not
posted has no bytes on the way and is ended by the watcher when its time is up (`PullThread.watch`). What was posted
stays unreported, whatever that costs, until the call returns; the watcher says so in the log.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from kvd.backends.contract import Backend, Lane, State, traits_of
from kvd.backends.errors import BackendError, BackendUnavailable, PeerMetadataError, RegistrationError
from kvd.shown import logger
from kvd.topology.errors import TopologyError
from kvd.topology.pieces import LEAST_BYTES
from kvd.topology.transfer_topology import TransferTopology
from kvd.wire.agent import HeldPeer
from kvd.worker.admission import AdmissionQueue
from kvd.worker.cause import SHUTTING_DOWN, Cause, from_error
from kvd.worker.host.timer_slack import sleep_precisely
from kvd.worker.inbox_thread import InboxThread, Rounds, holding
from kvd.worker.load import Load, clear_leftover, overdue
from kvd.worker.peers.followed import FollowedPeer, GiveUp, PeerChanged
from kvd.worker.peers.held import Evict
from kvd.worker.peers.probe import Probing, Told
from kvd.worker.pull.lanes import ReadLanes
from kvd.worker.pull.looks import next_look
from kvd.worker.pull.pieces import apply_plan, hold_back, look, pace, post
from kvd.worker.watchdog import STUCK_AFTER, Activity, complain

log = logger(__name__)

MAX_FAILURES = 3
LANE_GONE = Cause(
    "its lane was closed for another load's sake, and its step cannot wait for it again", "TRANSFER_FAILED"
)
HOPELESS = (PeerMetadataError, RegistrationError, BackendUnavailable, TopologyError)
"""What a new lane meets again: the peer's metadata, our own memory and a load's blocks stay what they are."""


class PullThread:
    """The thread of one peer engine.

    `on_peer_changed`, `begin`, `give_up` and `stop` only put something into a queue and return. ``ended`` is called
    once for each load, on this thread, the watcher's or a step's. A load that is dropped ends where nothing of it is
    posted; what is posted runs on, since ending it would cost all others on this lane a new one.
    """

    def __init__(
        self,
        engine_id: str,
        backend: Backend,
        topology: TransferTopology,
        ended: Callable[[Load], None],
        *,
        piece_bytes: int = LEAST_BYTES,
        probed: Told | None = None,
    ) -> None:
        """``probed`` is told of probes (`kvd.worker.peers.probe`); without it there are none."""
        self.engine_id = engine_id
        self._backend = backend
        self._topology = topology
        self._ended = ended
        self._piece_bytes = piece_bytes
        self._admission = AdmissionQueue()
        self._peer = FollowedPeer(engine_id, topology, lambda remote: remote.plan)
        self._activity = Activity()
        self._due: list[Load] = []  # of the waiting, those that the next turns post
        self._active: list[Load] = []  # posted on the lane of now
        self.lanes = ReadLanes(engine_id, backend, self._activity)
        self.probing = Probing(engine_id, probed)
        self._busy = threading.Lock()
        """Held by who does the thread's work: a step may post a load itself (`begin_now`)."""
        take, turn, failed, finish = (
            holding(self._busy, work) for work in (self._take, self._turn, self._drop_all, self._finish)
        )
        rounds = Rounds(self._pause, take, turn, failed, finish, begin=sleep_precisely)
        self._thread = InboxThread(
            f"kvd-lane-{engine_id[:12]}", f"lane to {engine_id}", rounds, one_by_one=True
        )

    def on_peer_changed(self) -> None:
        """Another generation of the peer is registered, or none; loads from the one before are misses."""
        self._thread.put(PeerChanged())

    def begin(self, load: Load) -> None:
        """Read one request's KV."""
        if not self._admission.put(load, self._thread.put):
            self._end(load, SHUTTING_DOWN)

    def begin_now(self, load: Load) -> bool:
        """Post a load on this thread: another one would wait for Python's lock, and then take it from this one.

        False where the thread is at work; then nothing has happened. The thread looks at it after `look_now`.
        """
        if not self._busy.acquire(blocking=False):
            return False
        try:
            # A load that goes back to those that wait, since its lane failed, is the thread's.
            free = self._thread.idle and not self._due and not self.probing.on
            free = free and self.lanes.now is not None and not self._peer.changed
            if not free or not self._admission.put(load, lambda _: None):
                return False
            self._start(load)
            self._post_next()
        except Exception as error:
            log.exception("posting the load of %s in its step", load.order.request_id)
            self._drop_all(error)
        finally:
            self._busy.release()
        if not load.under_way.is_set():
            self.look_now()
        return True

    def look_now(self) -> None:
        """Look at what is posted: any word brings that about."""
        self._thread.put(PeerChanged())

    def give_up(self, load: Load) -> None:
        """Make a load that was given here a miss, for the reason that it names as ``dropped``, if it has not ended."""
        self._thread.put(GiveUp(load))

    def withdraw(self, load: Load) -> None:
        """End a load that was dropped, if it is not posted and nobody has begun to; on any thread."""
        self._refuse(load, load.dropped or SHUTTING_DOWN)

    def evict(self, order: Evict) -> None:
        """Close the lane and what could not be closed before; the next load makes another one."""
        self._thread.put(order)

    def held(self) -> list[HeldPeer]:
        """What the thread holds of its peer, as it is just now; called on any thread."""
        active = list(self._active)
        posted = sum(transfer.bytes for load in active for transfer in load.pieces.transfers)
        return self.lanes.held(loads=len(active) + len(self._admission), loading_bytes=posted)

    def stop(self) -> None:
        """Give up whatever is on the way, destroy the lane, end the thread: begin all that."""
        self._admission.stop()
        self._thread.stop()

    def join(self, timeout: float) -> bool:
        """Wait for the end after `stop`. False where the backend may still touch memory."""
        return self._thread.join(timeout) and not self.lanes.unclosed

    # --- the watcher's thread ---

    def watch(self, now: float) -> float:
        """End what was never posted and whose time is up; complain of what was posted and is stuck.

        Gives the time.monotonic() at which to look again, infinity where nothing is held.
        """
        with self._admission.lock:
            posted = [*self._active, *(load for load, _ in self.lanes.unclosed.held)]
            stuck = [load for load in posted if now > load.deadline + STUCK_AFTER]
            late = self._admission.acquire_all() if stuck else self._admission.acquire_late(now)
            looks = self._admission.deadlines
        for load in stuck:
            complain(load, now, self.engine_id, self._activity.now)
        why = f"the thread of peer {self.engine_id} is busy {self._activity.now or 'with other loads'}"
        for load in late:
            late_by = f"not begun within its {load.seconds:.1f} s"
            self._end(load, Cause(f"{late_by}: {why}", "TOO_LATE"))
        looks += [max(load.deadline + STUCK_AFTER, load.complain_at) for load in posted]
        return min(looks, default=math.inf)

    # --- the thread ---

    def _turn(self) -> None:
        self._post_next()
        self._poll()
        self._probe()
        self._retry_close(time.monotonic())

    def _drop_all(self, error: Exception) -> None:
        """A round failed, whatever of it was done."""
        self._drop_lane(self._active, from_error(error, "unexpected error in the lane"))

    def _finish(self) -> None:
        self._drop_lane(self._active, SHUTTING_DOWN)
        self._retry_close(math.inf)
        for load in self._admission.acquire_all():
            self._end(load, SHUTTING_DOWN)

    def _pause(self) -> float | None:
        if self._due:
            return 0.0
        if not self._active and not self.probing.on:
            due = self.lanes.unclosed.due
            return max(0.0, min(due) - time.monotonic()) if due else None
        probe = self.probing
        return next_look(self._active, time.monotonic(), probing=probe.on, probe_posted=probe.posted)

    def _take(self, message: PeerChanged | Load | GiveUp | Evict) -> None:
        if isinstance(message, PeerChanged):
            self._follow()
        elif isinstance(message, Evict):
            self._evict(message)
        elif isinstance(message, GiveUp):
            end = self._give_up if message.load in self._active else self._refuse
            end(message.load, message.cause)
        elif self._admission.holds(message):
            self._start(message)

    def _follow(self) -> None:
        """Go by the peer as it is registered now."""
        if why := self._peer.parted():
            self._part(why)
        if not self._peer.learned():
            return
        remote = self._peer.remote
        if remote is None:
            log.error("%s", self._peer.absent)
            return
        log.info("%s", remote.describe_line())
        try:
            lane = self.lanes.open(self._peer)
        except BackendError as error:
            log.warning("lane to %s: %s; it will be tried again with the first load", self.engine_id, error)
            return
        with self._activity("probing"):
            # A load that waits is as good a probe.
            if self._admission.empty and self.probing.begin(remote, lane):
                self._drop_lane()

    def _probe(self) -> None:
        """Go on with the probe. The lane of one that went wrong is dropped: nothing is known of its bytes."""
        lane = self.lanes.now
        if lane is None or not self.probing.on:
            return
        with self._activity("probing"):
            failed = self.probing.look(lane, alone=not self._active and not self._due)
        if failed and not self._active:  # else its loads tell what the lane is worth
            self._drop_lane()

    def _part(self, why: Cause) -> None:
        """This generation of the peer is over: so are its loads, and the lane that its metadata went into."""
        due, self._due = self._due, []
        for load in (*self._active, *due):
            load.lost = True
        self._drop_lane(self._active, why)
        for load in due:
            self._refuse(load, why)

    def _evict(self, order: Evict) -> None:
        """Close the lane; where loads are on it or wait for it, only for a cause."""
        self._retry_close(math.inf)
        if self.lanes.now is None or not order.concerns(self.lanes.generation):
            return
        if order.cause is None:
            if not self._active and not self._due:
                self._drop_lane()
            return
        due, self._due = self._due, []
        self._drop_lane(self._active, order.cause)
        for load in due:
            self._refuse(load, order.cause)

    def _start(self, load: Load) -> None:
        self._follow()
        remote = self._peer.of(load.order.prefill.generation, "the blocks are")
        if isinstance(remote, Cause):
            self._refuse(load, remote)
            return
        try:
            if load.pieces.plan is None:
                traits = traits_of(self._backend, self.lanes.now)
                apply_plan(load, remote.plan, traits, piece_bytes=self._piece_bytes)
            if load.fault is not None and load.fault.when == "layers":
                local = self._topology
                hold_back(load, load.fault, local.worker, local.local.workers, remote.geometry.workers)
        except Exception as error:
            if not isinstance(error, TopologyError):
                log.exception("plan for the load of %s", load.order.request_id)
            self._refuse(load, from_error(error))
        else:
            self._due.append(load)

    def _acquire_to_post(self, load: Load) -> bool:
        """Whether a waiting load is still ours to post: the watcher may have ended it."""
        with self._admission.lock:  # the watcher sees it wait or active, never neither
            mine = self._admission.acquire(load)
            if mine:
                self._active.append(load)
        return mine

    def _refuse(self, load: Load, cause: Cause) -> None:
        """End a waiting load, if it is still ours to end."""
        if self._admission.acquire(load):
            self._end(load, cause)

    def _post_next(self) -> None:
        remote = self._peer.remote
        if not self._due or remote is None:
            return
        load = self._due.pop(0)
        if why := load.dropped or overdue(load, "posted"):
            self._refuse(load, why)
            return
        if not self._acquire_to_post(load):
            return
        for piece in load.pieces.left:
            piece.transfers = []
        try:
            lane = self.lanes.open(self._peer)
            with self._activity("posting"):
                clear_leftover(load, remote.plan, self._topology.worker)
                post(load, lane, traits_of(self._backend, lane))
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
            lane = self.lanes.now
            if load not in self._active or lane is None:
                continue  # ended, or to be posted again, together with another load of this turn
            with self._activity("polling"):
                state, reason = look(load, lane)
            late = overdue(load, "complete")
            if state is State.DONE and load.fault is not None and not late:
                self._give_up(load, load.fault.cause)
            elif state is State.DONE:
                self._active.remove(load)
                self.lanes.pace = pace(load) or self.lanes.pace
                # What was read too late may not be used: its lease may have ended.
                self._end(load, late)
            elif late:
                self._give_up(load, late)
            elif state is State.FAILED:
                self._failed(load, reason)

    def _failed(self, load: Load, reason: str) -> None:
        """A load failed: again on a new lane while its time allows, else a miss."""
        load.failures += 1
        if load.failures < MAX_FAILURES and not load.once and time.monotonic() < load.deadline:
            request, peer = load.order.request_id, self.engine_id
            log.info("load of %s from %s failed (%s); trying again on a new lane", request, peer, reason)
            self._drop_lane()
        else:
            self._give_up(load, Cause(reason, "TRANSFER_FAILED"))

    def _give_up(self, load: Load, cause: Cause) -> None:
        """End a posted load as a miss; where bytes may be on the way, after the lane is gone."""
        if load.pieces.transfers:
            self._drop_lane([load], cause)
        else:
            self._active.remove(load)
            self._end(load, cause)

    def _drop_lane(self, ending: Sequence[Load] = (), cause: Cause | None = None) -> None:
        """Destroy the lane, then end ``ending``; all others that were on it start over on a new one."""
        self.probing.stop()
        rest = [load for load in self._active if load not in ending and not load.once]
        ends: list[tuple[Load, Cause | None]] = [(load, cause) for load in ending]
        ends += [(load, LANE_GONE) for load in self._active if load not in ending and load.once]
        stands = self._close()
        with self._admission.lock:
            if stands is not None:
                lane, error = stands
                # Whatever was posted on it may still be written: nothing of it may be reported or posted again.
                held = [*ends, *((load, Cause(error, "TRANSFER_FAILED")) for load in rest)]
                self.lanes.unclosed.hold(lane, held)
                ends, rest = [], []
            self._active = []
            self._admission.put_back(rest)
        self._due = [*rest, *self._due]
        for load, why in ends:
            self._end(load, why)

    def _close(self) -> tuple[Lane, str] | None:
        return self.lanes.close()

    def _retry_close(self, now: float) -> None:
        """Try again to close what could not be closed, and end the loads that wait for it."""
        for load, cause in self.lanes.retry_close(now):
            self._end(load, cause)

    def _end(self, load: Load, cause: Cause | None) -> None:
        load.end(cause)
        try:
            self._ended(load)
        except Exception:  # of whoever is told; the lane's thread has other loads to end
            log.exception("end of the load of %s from %s", load.order.request_id, self.engine_id)
