"""What one peer engine writes into: one window at a time, and those that could not be closed yet.

A window is taken away like a lane. What was announced on one that cannot be closed may still be written, so it is held
back until it can be.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kvd.backends.contract import Backend, Window, WindowBackend
from kvd.worker.cause import Cause
from kvd.worker.pull.reader import DESTROY_AGAIN
from kvd.worker.push.arrival import Arrival

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Unclosed:
    """A window that could not be closed, and what may still be written through it, each with its cause."""

    window: Window
    arrivals: list[tuple[Arrival, Cause]]
    again: float


class Windows:
    """The windows of one peer engine, one after the other; ``number`` counts them, from 0.

    Used by one thread; ``busy`` is entered with what it is about to do in the backend. Where the backend has no
    windows there is never one, and the number stays 0.
    """

    def __init__(
        self, engine_id: str, backend: Backend, busy: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._engine_id = engine_id
        self._backend: WindowBackend | None = (
            backend if backend.traits.lands and isinstance(backend, WindowBackend) else None
        )
        self._busy = busy
        self._now: Window | None = None
        self._unclosed: list[_Unclosed] = []
        self.number = -1 if self.possible else 0
        self.metadata = b""

    @property
    def possible(self) -> bool:
        """Whether peers can write here at all."""
        return self._backend is not None

    @property
    def held(self) -> list[Arrival]:
        """What waits for a window that could not be closed."""
        return [arrival for unclosed in list(self._unclosed) for arrival, _ in unclosed.arrivals]

    @property
    def due(self) -> list[float]:
        """When closing is tried again."""
        return [unclosed.again for unclosed in self._unclosed]

    def open(self) -> None:
        """See that there is a window. Raises `BackendError` where none can be made."""
        if self._now is not None or self._backend is None:
            return
        with self._busy("making a window"):
            window = self._backend.window(self._engine_id)
            try:
                self.metadata = window.metadata()
            except Exception:  # whatever it is goes on to the caller
                self._close(window)  # nobody was told of it
                raise
        self._now = window
        self.number += 1

    def progress(self) -> bool:
        """Let bytes land. False where nothing is there to be served."""
        if self._now is None:
            return False
        with self._busy("serving its window"):
            self._now.progress()
        return True

    def close(self) -> tuple[Window, str] | None:
        """Close the window of now. The window and why it still stands, or None when nothing can land any more."""
        window, self._now = self._now, None
        if window is not None and (error := self._close(window)):
            return window, error
        return None

    def hold(self, window: Window, arrivals: list[tuple[Arrival, Cause]]) -> None:
        """Keep what was announced on a window that could not be closed."""
        self._unclosed.append(_Unclosed(window, arrivals, time.monotonic() + DESTROY_AGAIN))

    def retry_close(self, now: float) -> list[tuple[Arrival, Cause]]:
        """Try again to close what could not be closed; gives what need not wait any more."""
        freed: list[tuple[Arrival, Cause]] = []
        for unclosed in [u for u in self._unclosed if now >= u.again]:
            if self._close(unclosed.window):
                unclosed.again = time.monotonic() + DESTROY_AGAIN
            else:
                self._unclosed.remove(unclosed)
                freed += unclosed.arrivals
        return freed

    def _close(self, window: Window) -> str:
        """Why the window still stands, or nothing."""
        try:
            with self._busy("closing its window"):
                window.close()
        except Exception as error:
            log.exception("window of %s could not be closed; it will be tried again", self._engine_id)
            return f"the window of {self._engine_id} could not be closed: {error}"
        return ""
