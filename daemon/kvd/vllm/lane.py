"""The way to one peer engine: a thread that owns a lane and all loads on it.

The thread is the only one that touches the backend for this peer, so a slow, stopped or dead peer holds up
nobody else. Its one rule: a load that did not complete is reported only after the lane was destroyed, because
only then can none of its bytes land in memory that vLLM is about to use again. The other loads on that lane
start over on a new one; reading again is harmless, the memory is still theirs.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvd.backends.contract import Home, Lane, State
from kvd.backends.errors import BackendError
from kvd.client.cards import engine_geometry
from kvd.geometry.errors import GeometryError
from kvd.geometry.model import WorkerGeometry
from kvd.topology.errors import TopologyError
from kvd.topology.plan import Plan, plan_worker
from kvd.vllm.load import Load, apply_plan, look, post
from kvd.wire.identity import EngineCard

log = logging.getLogger(__name__)

POLL_FAST, POLL_SLOW, FAST_FOR = 50e-6, 1e-3, 0.02
"""Seconds between polls: quick while a load is young, slower after; spinning would starve the transport."""
MAX_ATTEMPTS = 3
CLOSE_AGAIN = 0.1
"""Seconds before a lane that would not close is closed again; doubles up to 5."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer engine's card and the plan to read from it."""

    card: EngineCard
    plan: Plan
    metadata: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Gone:
    generation: str
    reason: str


class PeerLane:
    """The thread of one peer engine. Its methods only put something into a queue and return."""

    def __init__(
        self,
        engine_id: str,
        home: Home,
        local: WorkerGeometry,
        siblings: tuple[WorkerGeometry, ...],
        ended: Callable[[Load, Plan | None], None],
    ) -> None:
        self.engine_id = engine_id
        self._home = home
        self._local = local
        self._siblings = siblings
        self._ended = ended
        self._inbox: queue.SimpleQueue[EngineCard | Load | _Gone | None] = queue.SimpleQueue()
        self._lane: Lane | None = None
        self._peer: Peer | None = None
        self._active: list[Load] = []
        self._thread = threading.Thread(target=self._run, name=f"kvd-lane-{engine_id[:12]}", daemon=True)
        self._thread.start()

    def know(self, card: EngineCard) -> None:
        """The peer as it is now: plan and connect ahead of the first load."""
        self._inbox.put(card)

    def load(self, load: Load) -> None:
        """Read one request's KV."""
        self._inbox.put(load)

    def gone(self, generation: str, reason: str) -> None:
        """This generation of the peer ended: its loads are misses."""
        self._inbox.put(_Gone(generation, reason))

    def close(self, timeout: float) -> None:
        """Give up whatever is on the way, destroy the lane, end the thread."""
        self._inbox.put(None)
        self._thread.join(timeout)

    # --- the thread ---

    def _run(self) -> None:
        open_ = True
        while open_:
            try:
                open_ = self._turn()
            except Exception as error:  # the thread must outlive any single load
                log.exception("lane to %s: unexpected error", self.engine_id)
                self._give_up_all(f"unexpected error in the lane: {type(error).__name__}: {error}")
        self._give_up_all("the engine is shutting down")

    def _turn(self) -> bool:
        try:
            message = self._inbox.get(timeout=self._pause())
        except queue.Empty:
            self._poll()
            return True
        if message is None:
            return False
        if isinstance(message, EngineCard):
            self._learn(message)
        elif isinstance(message, _Gone):
            if self._peer is not None and self._peer.card.generation == message.generation:
                self._give_up_all(f"peer {self.engine_id} is gone: {message.reason}")
                self._peer = None
        elif isinstance(message, Load):
            self._start(message)
        self._poll()
        return True

    def _pause(self) -> float | None:
        if not self._active:
            return None
        youngest = max(load.posted for load in self._active)
        return POLL_FAST if time.monotonic() - youngest < FAST_FOR else POLL_SLOW

    def _learn(self, card: EngineCard) -> None:
        if self._peer is not None and self._peer.card.generation == card.generation:
            return
        try:
            geometry = engine_geometry(card)
            plan = plan_worker(self._local, self._siblings, geometry.workers)
        except (GeometryError, TopologyError) as error:
            log.error("peer %s does not fit: %s", self.engine_id, error)  # noqa: TRY400 - the message says it all
            return
        self._give_up_all(f"peer {self.engine_id} restarted as generation {card.generation}")
        self._peer = Peer(card, plan, tuple(w.metadata for w in card.workers))
        try:
            self._open_lane(self._peer)
        except BackendError as error:
            log.warning("lane to %s: %s; it will be tried again with the first load", self.engine_id, error)
            self._close_lane()

    def _start(self, load: Load) -> None:
        peer = self._peer
        if peer is None:
            self._end(
                load, f"peer {self.engine_id} is not known here, or does not fit (see the log of this worker)"
            )
            return
        if load.order.prefill.generation and load.order.prefill.generation != peer.card.generation:
            was, now = load.order.prefill.generation, peer.card.generation
            self._end(
                load, f"peer {self.engine_id} is generation {now} now, the blocks are of generation {was}"
            )
            return
        try:
            apply_plan(load, peer.plan)
        except TopologyError as error:
            self._end(load, str(error))
            return
        self._active.append(load)
        self._post(load)

    def _post(self, load: Load) -> None:
        """Put a load on the lane; what goes wrong is found by the next look at it."""
        load.attempts += 1
        load.failure = ""
        peer = self._peer
        if peer is None:
            load.failure = f"peer {self.engine_id} is gone"
            return
        try:
            post(load, self._open_lane(peer), peer.plan)
        except BackendError as error:
            load.failure = error.message

    def _poll(self) -> None:
        """Look at every load once; end what is over, and start over what shared a lane with a failure."""
        given_up: list[tuple[Load, str]] = []
        failed = False
        for load in list(self._active):
            state, reason = self._look(load)
            now = time.monotonic()
            if now > load.deadline:
                given_up.append((load, f"not complete within its {load.deadline - load.received:.1f} s"))
            elif state is State.DONE:
                self._active.remove(load)
                self._end(load, "")
            elif state is State.FAILED:
                failed = True
                log.info("load of %s from %s failed: %s", load.order.request_id, self.engine_id, reason)
                if load.attempts >= MAX_ATTEMPTS or self._peer is None:
                    given_up.append((load, reason))
        if given_up or failed:
            self._give_up(given_up)
            for load in self._active:
                self._post(load)

    def _look(self, load: Load) -> tuple[State, str]:
        if load.failure or self._lane is None:
            return State.FAILED, load.failure or f"peer {self.engine_id} has no lane"
        return look(load, self._lane)

    def _give_up(self, loads: list[tuple[Load, str]]) -> None:
        """Close the lane, and only then end loads as misses; what else was on the lane has to be posted again."""
        self._close_lane()
        for load, cause in loads:
            self._active.remove(load)
            self._end(load, cause)

    def _end(self, load: Load, cause: str) -> None:
        load.cause = cause
        load.ended = time.monotonic()
        self._ended(load, self._peer.plan if self._peer else None)

    def _open_lane(self, peer: Peer) -> Lane:
        if self._lane is None:
            lane = self._lane = self._home.lane(self.engine_id)
            for index in peer.plan.sources:
                lane.add(str(peer.plan.remote_ranks[index]), peer.metadata[index])
        return self._lane

    def _give_up_all(self, cause: str) -> None:
        self._give_up([(load, cause) for load in self._active])

    def _close_lane(self) -> None:
        """Return when nothing of the lane can land any more, however long that takes.

        Until then none of its loads may be reported: their blocks would be used again.
        """
        lane, self._lane = self._lane, None
        pause = CLOSE_AGAIN
        while lane is not None:
            try:
                lane.close()
                lane = None
            except BackendError as error:
                log.error("lane to %s is not closed, its loads wait: %s", self.engine_id, error)  # noqa: TRY400 - no new fact in a traceback
                time.sleep(pause)
                pause = min(2 * pause, 5.0)
