"""The threads that transfer from each peer engine, and the one fork between pull and push.

A peer that is pulled from has a lane's thread (`kvd.worker.pull.reader`), one that pushes has a thread of what arrives
(`kvd.worker.push.receiver`). What they go by is the worker's `TransferTopology`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping

from kvd.wire.agent import HeldPeer
from kvd.wire.push import PushProgress
from kvd.worker.cause import SHUTTING_DOWN
from kvd.worker.context import WorkerContext
from kvd.worker.load import Load
from kvd.worker.peers.held import Evict
from kvd.worker.peers.probe import Told
from kvd.worker.pull.reader import PullThread
from kvd.worker.push.receiver import PushThread
from kvd.worker.watchdog import Watch


class PeerThreads:
    """Made when they are first needed. Nothing here waits for anything but the locks of dictionaries."""

    def __init__(self, context: WorkerContext, probed: Told | None) -> None:
        """``probed`` is told of probes (`kvd.worker.peers.probe`); without it there are none."""
        self._context = context
        self._probed = probed
        self._lock = threading.Lock()
        self._closed = False
        self.lanes: dict[str, PullThread] = {}
        self.arrivals: dict[str, PushThread] = {}
        self._watch = Watch(self._look)

    def begin(self, load: Load) -> bool:
        """Have it read or pushed. False once this worker closes."""
        way = self._way(load)
        if way is not None:
            way.begin(load)
            self._watch.nudge()
        return way is not None

    def read(self, load: Load) -> None:
        """Read a part of what is pushed to a worker that reads by itself."""
        lane = self.lane(load.order.prefill.engine_id)
        if lane is None:
            self._context.ends.refuse(load, SHUTTING_DOWN)
        else:
            lane.begin(load)
            self._watch.nudge()

    def drop(self, load: Load) -> None:
        """Nobody waits for it any more. A pull that is posted runs on, since ending it would cost others their lane."""
        if load.order.transfer_id:
            self.give_up(load)

    def give_up(self, load: Load) -> None:
        """Make it a miss, for the reason that it names as ``dropped``, if it has not ended."""
        threads: Mapping[str, PullThread | PushThread] = (
            self.arrivals if load.order.transfer_id else self.lanes
        )
        if way := threads.get(load.order.prefill.engine_id):
            way.give_up(load)

    def _way(self, load: Load) -> PullThread | PushThread | None:
        """The fork: by which thread a load comes."""
        engine_id = load.order.prefill.engine_id
        return self._push_thread(engine_id) if load.order.transfer_id else self.lane(engine_id)

    def lane(self, engine_id: str) -> PullThread | None:
        """The lane to a peer, made where it is the first; None once this worker closes."""
        context = self._context
        with self._lock:
            lane = self.lanes.get(engine_id)
            if lane is None and not self._closed:
                lane = self.lanes[engine_id] = PullThread(
                    engine_id, context.backend, context.topology, context.ends.ended,
                    piece_bytes=context.settings.piece_bytes, probed=self._probed,
                )  # fmt: skip
            return lane

    def _push_thread(self, engine_id: str) -> PushThread | None:
        with self._lock:
            arrivals = self.arrivals.get(engine_id)
            if arrivals is None and not self._closed:
                arrivals = self.arrivals[engine_id] = PushThread(engine_id, self._context, self.read)
            return arrivals

    # --- what kvd says ---

    def on_peer_changed(self, engine_id: str) -> None:
        """Another generation of the peer is registered, or none."""
        for way in self._all():
            if way.engine_id == engine_id:
                way.on_peer_changed()

    def on_progress(self, message: PushProgress) -> None:
        """A prefilling worker's word. One about a transfer that is not on its way is no error."""
        if arrivals := self.arrivals.get(message.key.prefiller):
            arrivals.on_progress(message)

    # --- what operators ask ---

    def held(self) -> list[HeldPeer]:
        """What all threads hold of their peers just now."""
        return [one for way in self._all() for one in way.held()]

    def evict(self, engine_id: str, order: Evict) -> None:
        """Close what is held of a peer: begin that."""
        for way in self._all():
            if way.engine_id == engine_id:
                way.evict(order)

    # --- the watcher's thread ---

    def _look(self, now: float) -> float:
        return min((way.watch(now) for way in self._all()), default=math.inf)

    # --- the end ---

    def stop(self) -> None:
        """Give up whatever is under way: begin that."""
        with self._lock:
            self._closed = True
        for way in self._all():
            way.stop()

    def join(self, until: float) -> list[str]:
        """Wait for the threads, to time.monotonic() ``until``. The peers whose threads may still be at work."""
        return [way.engine_id for way in self._all() if not way.join(until - time.monotonic())]

    def close(self) -> None:
        """Watch no more."""
        self._watch.close()

    # --- private ---

    def _all(self) -> list[PushThread | PullThread]:
        with self._lock:
            return [*self.arrivals.values(), *self.lanes.values()]
