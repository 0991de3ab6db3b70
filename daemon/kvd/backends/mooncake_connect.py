"""Connecting an engine to a peer within a time of our own, and making sure that it is that peer.

Mooncake's first post to a session asks the peer for its memory and waits a minute for the answer of one that is
stopped; nothing ends that from outside. So a thread of its own makes the call, and where that does not come back in
time it keeps the engine, on which nothing else was ever posted, until it does.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from kvd.backends.errors import BackendError, PeerMetadataError, PeerUnreachable
from kvd.backends.mooncake_engine import COMPLETED, WAITING, Engine, knock
from kvd.backends.mooncake_library import LOG, NAME
from kvd.backends.mooncake_mark import MARK_BYTES
from kvd.backends.mooncake_target import Target

_PAUSE_S = 2e-4


def connect(engine: Engine, target: Target, peer: str, timeout_s: float) -> Engine:
    """The engine, once it has read the target's mark; destroyed where it has not.

    Raises:
        PeerUnreachable: no answer within ``timeout_s`` seconds, or Mooncake could not read.
        PeerMetadataError: another process answers.
    """
    until = time.monotonic() + timeout_s
    opening = _Opening(engine, target)
    threading.Thread(target=opening.run, name=f"open-{target.session}", daemon=True).start()
    if not opening.wait(timeout_s):
        raise PeerUnreachable(
            f"peer {peer} did not answer within {timeout_s} s; "
            f"{knock(target.session, 'it is stopped, very busy, or held up by a connection that says nothing')}",
            backend=NAME,
            hint="the option connect_timeout_s says how long to wait",
        )
    failure = _read(engine, opening.number, target, peer, until)
    if failure is not None:
        engine.destroy()
        raise failure
    return engine


@dataclass(slots=True, eq=False)
class _Opening:
    """The first post, made on a thread; whoever comes second finds out what the first did."""

    engine: Engine
    target: Target
    number: int | None = None
    _over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _left: bool = False

    def run(self) -> None:
        """Post; where nobody waits any more, destroy the engine."""
        number = self.engine.post(
            "read",
            self.target.session,
            self.engine.mark.scratch_address,
            self.target.mark_address,
            MARK_BYTES,
        )
        with self._lock:
            self.number = number
            self._over.set()
            left = self._left
        if left:
            self.engine.destroy()

    def wait(self, seconds: float) -> bool:
        """Whether the post returned; if not the engine is the thread's from now on."""
        self._over.wait(seconds)
        with self._lock:
            self._left = not self._over.is_set()
            return not self._left


def _read(engine: Engine, number: int | None, target: Target, peer: str, until: float) -> BackendError | None:
    """Wait for the mark; what is wrong, if anything."""
    state = -1 if number is None else WAITING
    while number is not None and state == WAITING and time.monotonic() < until:
        state = engine.status(number)
        if state == WAITING:
            time.sleep(_PAUSE_S)
    if state == WAITING:
        what = "answers on its first port and not on the one for data"
    elif state != COMPLETED:
        what = "did not let its mark be read"
    elif (found := engine.mark.scratch()) != target.mark:
        return PeerMetadataError(
            f"{target.session} is not of the process that wrote the metadata of peer {peer}: its mark is "
            f"{found.hex()}, not {target.mark.hex()}",
            backend=NAME,
            hint="the peer was started anew; its new metadata is needed",
        )
    else:
        return None
    return PeerUnreachable(
        f"peer {peer} {what}; {knock(target.session, 'Mooncake gives no reason')}",
        backend=NAME,
        hint=LOG,
    )
