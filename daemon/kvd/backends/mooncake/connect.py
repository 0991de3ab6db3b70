"""Connecting an engine to a peer within a time of our own, and making sure that it is that peer.

Mooncake's first post to a session asks the peer for its memory and waits a minute for the answer of one that is
stopped; nothing ends that from outside. So a thread of its own makes the call, and where that does not come back in
time it keeps the engine, on which nothing else was ever posted, until it does. The same thread sees to the end of what
it posted. With CUDA IPC Mooncake copies on a stream of the thread that posts. That stream ends with the thread, and
asking for the state afterwards ends the process.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from kvd.backends.errors import BackendError, PeerMetadataError, WorkerUnreachable
from kvd.backends.mooncake.engine import COMPLETED, WAITING, MooncakeEngine, knock
from kvd.backends.mooncake.library import LOG, NAME
from kvd.backends.mooncake.mark import MARK_BYTES
from kvd.backends.mooncake.target import EngineTarget

_PAUSE_S = 2e-4


def connect(engine: MooncakeEngine, target: EngineTarget, peer: str, timeout_s: float) -> MooncakeEngine:
    """The engine, once it has read the target's mark; destroyed where it has not.

    Raises:
        WorkerUnreachable: no answer within ``timeout_s`` seconds, or Mooncake could not read.
        PeerMetadataError: another process answers.
    """
    opening = _Opening(engine, target, time.monotonic() + timeout_s)
    thread = threading.Thread(target=opening.run, name=f"open-{target.session}", daemon=True)
    thread.start()
    if not opening.wait(timeout_s):
        raise WorkerUnreachable(
            f"peer {peer} did not answer within {timeout_s} s; "
            f"{knock(target.session, 'it is stopped, very busy, or held up by a connection that says nothing')}",
            backend=NAME,
            hint="the option connect_timeout_s says how long to wait",
        )
    thread.join()  # it looks until the same time
    failure = _failure(opening, peer)
    if failure is not None:
        engine.destroy()
        raise failure
    return engine


@dataclass(slots=True, eq=False)
class _Opening:
    """The first read, of the mark, made on a thread; whoever comes second finds out what the first did."""

    engine: MooncakeEngine
    target: EngineTarget
    until: float
    state: int = WAITING
    error: str = ""
    _posted: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _left: bool = False

    def run(self) -> None:
        """Post, and look until it is over or the time is up; where nobody waits any more, destroy the engine."""
        number = self._post()
        with self._lock:
            self._posted.set()
            left = self._left
        if left:
            self.engine.destroy()
            return
        self.state = -1 if number is None else self.engine.status(number)
        while number is not None and self.state == WAITING and time.monotonic() < self.until:
            time.sleep(_PAUSE_S)
            self.state = self.engine.status(number)

    def _post(self) -> int | None:
        mark = self.engine.mark.scratch_address
        try:
            return self.engine.post("read", self.target.session, mark, self.target.mark_address, MARK_BYTES)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is for the one who waits
            self.error = f"{type(error).__name__}: {error}"
            return None

    def wait(self, seconds: float) -> bool:
        """Whether the post returned; if not the engine is the thread's from now on."""
        self._posted.wait(seconds)
        with self._lock:
            self._left = not self._posted.is_set()
            return not self._left


def _failure(opening: _Opening, peer: str) -> BackendError | None:
    """What is wrong with the mark that was read, if anything."""
    target = opening.target
    if opening.error:
        what = f"could not be asked for its mark: {opening.error}"
    elif opening.state == WAITING:
        what = "answers on its first port and not on the one for data"
    elif opening.state != COMPLETED:
        what = "did not let its mark be read"
    elif (found := opening.engine.mark.scratch().hex()) != target.mark:
        return PeerMetadataError(
            f"{target.session} is not of the process that wrote the metadata of peer {peer}: its mark is "
            f"{found}, not {target.mark}",
            backend=NAME,
            hint="the peer was started anew; its new metadata is needed",
        )
    else:
        return None
    return WorkerUnreachable(
        f"peer {peer} {what}; {knock(target.session, 'Mooncake gives no reason')}",
        backend=NAME,
        hint=LOG,
    )
