"""The window of one peer engine: what it writes into, one window at a time.

A window is taken away like a lane. What was announced on one that cannot be closed may still be written, so it is held
back until it can be.
"""

from __future__ import annotations

from kvd.backends.contract import Backend, Window, WindowBackend
from kvd.wire.agent import HeldPeer
from kvd.worker.cause import Cause
from kvd.worker.push.arrival import Arrival
from kvd.worker.unclosed import Unclosed
from kvd.worker.watchdog import Activity


class Windows:
    """The windows of one peer engine, one after the other; ``number`` counts them, from 0.

    Used by one thread, but for what is ``unclosed``; ``activity`` is told what it does in the backend. Where the
    backend has no windows there is never one, and the number stays 0.
    """

    def __init__(self, engine_id: str, backend: Backend, activity: Activity) -> None:
        self._engine_id = engine_id
        self._backend: WindowBackend | None = (
            backend if backend.traits.lands and isinstance(backend, WindowBackend) else None
        )
        self._activity = activity
        self._now: Window | None = None
        self.unclosed: Unclosed[tuple[Arrival, Cause]] = Unclosed(f"the window of {engine_id}", activity)
        self.number = -1 if self.possible else 0
        self.metadata = b""

    @property
    def possible(self) -> bool:
        """Whether peers can write here at all."""
        return self._backend is not None

    def open(self) -> None:
        """See that there is a window. Raises `BackendError` where none can be made."""
        if self._now is not None or self._backend is None:
            return
        with self._activity("making a window"):
            window = self._backend.window(self._engine_id)
            try:
                self.metadata = window.metadata()
            except Exception:  # whatever it is goes on to the caller
                if self.unclosed.close(window):
                    self.unclosed.hold(window)  # of which nobody was told
                raise
        self._now = window
        self.number += 1

    def progress(self) -> None:
        """Let bytes land."""
        if self._now is not None:
            with self._activity("serving its window"):
                self._now.progress()

    def held(self, generation: str, loads: int, loading_bytes: int) -> list[HeldPeer]:
        """The windows that stand, for that generation of the peer; on any thread. They are of our own memory."""
        stuck = len(self.unclosed.things)
        count = stuck + (self._now is not None)
        if not count:
            return []
        return [
            HeldPeer(
                engine_id=self._engine_id,
                generation=generation,
                use="window",
                lanes=count,
                stuck=stuck,
                loads=loads,
                loading_bytes=loading_bytes,
                busy=self._activity.now,
            )
        ]

    def close(self) -> tuple[Window, str] | None:
        """Close the window of now. The window and why it still stands, or None when nothing can land any more."""
        window, self._now = self._now, None
        if window is not None and (error := self.unclosed.close(window)):
            return window, error
        return None
