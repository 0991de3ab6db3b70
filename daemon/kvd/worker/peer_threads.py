"""The threads that transfer from each peer engine, and the one fork between pull and push.

A peer that is pulled from has a `PullThread` (`kvd.worker.pull.reader`), one that pushes a `ReceiveThread`
(`kvd.worker.push.receiver`). What they go by is the worker's `TransferTopology`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping

from kvd.wire.agent import HeldPeer
from kvd.wire.push import PushProgress
from kvd.worker.cause import SHUTTING_DOWN, Cause, from_error
from kvd.worker.context import WorkerContext
from kvd.worker.later import together
from kvd.worker.load import Load
from kvd.worker.peers.held import Evict
from kvd.worker.peers.probe import Told
from kvd.worker.pull.reader import PullThread
from kvd.worker.push.receiver import ReceiveThread
from kvd.worker.watchdog import Watch


class PeerThreads:
    """Made when they are first needed.

    Nothing here waits for anything but locks: of dictionaries, and for loads that steps use (`kvd.worker.in_step`) of a
    lane, which its thread holds while it is in the backend.
    """

    def __init__(self, context: WorkerContext, probed: Told | None) -> None:
        """``probed`` is told of probes (`kvd.worker.peers.probe`); without it there are none."""
        self._context = context
        self._probed = probed
        self._lock = threading.Lock()
        self._closed = False
        self.pull_threads: dict[str, PullThread] = {}
        self.receive_threads: dict[str, ReceiveThread] = {}
        self._watch = Watch(self._look)

    def begin(self, load: Load) -> Cause | None:
        """Have it read or pushed. Why that is not so: this worker closes, or the system starts no further thread."""
        return self._begin(load, self._thread_of)

    def read(self, load: Load) -> None:
        """Read a part of what is pushed to a worker that reads by itself."""
        if cause := self._begin(load, self._puller_of):
            self._context.ends.refuse(load, cause)

    def begin_now(self, load: Load) -> bool:
        """Have a pull posted on this thread; False where it was not. Nobody looks at it before `look_now`."""
        thread = self.pull_threads.get(load.order.prefill.engine_id)
        return thread is not None and thread.begin_now(load)

    def look_now(self, load: Load) -> None:
        """Have its thread look at a pull that was posted in its step, and the watcher at its deadline."""
        if thread := self.pull_threads.get(load.order.prefill.engine_id):
            thread.look_now()
        self._watch_soon(load)

    def landed(self, load: Load) -> bool:
        """Whether all of a pull that is posted is here, in time."""
        thread = self.pull_threads.get(load.order.prefill.engine_id)
        return thread is not None and thread.lanes.landed(load)

    def precede(self, load: Load, stream: int) -> bool:
        """Have what is queued on a stream from now on run after a pull that is posted. Raises `BackendError`.

        False where that cannot be.
        """
        thread = self.pull_threads.get(load.order.prefill.engine_id)
        return thread is not None and thread.lanes.precede(load, stream)

    def withdraw(self, load: Load) -> None:
        """End a pull that was dropped, on this thread, if it is not posted and nobody has begun to."""
        if thread := self.pull_threads.get(load.order.prefill.engine_id):
            thread.withdraw(load)

    def drop(self, load: Load) -> None:
        """Nobody waits for it any more. A pull that is posted runs on, since ending it would cost others their lane."""
        if load.order.transfer_id:
            self.give_up(load)

    def give_up(self, load: Load) -> None:
        """Make it a miss, for the reason that it names as ``dropped``, if it has not ended."""
        threads: Mapping[str, PullThread | ReceiveThread] = (
            self.receive_threads if load.order.transfer_id else self.pull_threads
        )
        if thread := threads.get(load.order.prefill.engine_id):
            thread.give_up(load)

    def _begin(
        self, load: Load, thread_of: Callable[[Load], PullThread | ReceiveThread | None]
    ) -> Cause | None:
        try:
            thread = thread_of(load)
        except RuntimeError as error:  # the peer's first load
            return from_error(error, f"the thread of peer {load.order.prefill.engine_id}")
        if thread is None:
            return SHUTTING_DOWN
        thread.begin(load)
        self._watch_soon(load)
        return None

    def _watch_soon(self, load: Load) -> None:
        """Have the watcher look by its deadline, and soon at all there is: what it waits behind may be stuck."""
        self._watch.by(min(load.deadline, together(time.monotonic())))

    def _thread_of(self, load: Load) -> PullThread | ReceiveThread | None:
        """The fork: the thread by which a load comes."""
        pushed = load.order.transfer_id
        return self._receive_thread(load.order.prefill.engine_id) if pushed else self._puller_of(load)

    def _puller_of(self, load: Load) -> PullThread | None:
        return self.pull_thread(load.order.prefill.engine_id)

    def pull_thread(self, engine_id: str) -> PullThread | None:
        """The thread that pulls from a peer, made where it is the first; None once this worker closes."""
        context = self._context
        with self._lock:
            thread = self.pull_threads.get(engine_id)
            if thread is None and not self._closed:
                thread = self.pull_threads[engine_id] = PullThread(
                    engine_id, context.backend, context.topology, context.ends.ended,
                    piece_bytes=context.settings.piece_bytes, probed=self._probed,
                )  # fmt: skip
            return thread

    def _receive_thread(self, engine_id: str) -> ReceiveThread | None:
        with self._lock:
            thread = self.receive_threads.get(engine_id)
            if thread is None and not self._closed:
                thread = self.receive_threads[engine_id] = ReceiveThread(engine_id, self._context, self.read)
            return thread

    # --- what kvd says ---

    def on_peer_changed(self, engine_id: str) -> None:
        """Another generation of the peer is registered, or none."""
        for thread in self._all():
            if thread.engine_id == engine_id:
                thread.on_peer_changed()

    def on_progress(self, message: PushProgress) -> None:
        """A prefilling worker's word. One about a transfer that is not on its way is no error."""
        if thread := self.receive_threads.get(message.key.prefiller):
            thread.on_progress(message)

    # --- what operators ask ---

    def held(self) -> list[HeldPeer]:
        """What all threads hold of their peers just now."""
        return [one for thread in self._all() for one in thread.held()]

    def evict(self, engine_id: str, order: Evict) -> None:
        """Close what is held of a peer: begin that."""
        for thread in self._all():
            if thread.engine_id == engine_id:
                thread.evict(order)

    # --- the watcher's thread ---

    def _look(self, now: float) -> float:
        return min((thread.watch(now) for thread in self._all()), default=math.inf)

    # --- the end ---

    def stop(self) -> None:
        """Give up whatever is under way: begin that."""
        with self._lock:
            self._closed = True
        for thread in self._all():
            thread.stop()

    def join(self, until: float) -> list[str]:
        """Wait for the threads, to time.monotonic() ``until``. The peers whose threads may still be at work."""
        return [thread.engine_id for thread in self._all() if not thread.join(until - time.monotonic())]

    def close(self) -> None:
        """Watch no more."""
        self._watch.close()

    # --- private ---

    def _all(self) -> list[ReceiveThread | PullThread]:
        with self._lock:
            return [*self.receive_threads.values(), *self.pull_threads.values()]
