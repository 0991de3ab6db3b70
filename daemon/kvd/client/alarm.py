"""A timer that ends a wait later, and that is set without waking whoever waits: Linux's timerfd.

A thread that is woken to learn that something is due in ten milliseconds takes Python's lock for that, and who set the
timer may be vLLM's step, which needs the lock itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import threading
import time

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1  # TFD_TIMER_ABSTIME
_NONBLOCK, _CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC  # timerfd's flags are those of open

_libc = ctypes.PyDLL(None, use_errno=True)  # which keeps Python's lock: these calls do not wait


class _Timer(ctypes.Structure):
    """``struct itimerspec``."""

    _fields_ = (
        ("again_seconds", ctypes.c_long),
        ("again_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


class Alarm:
    """Rings once at the earliest time that it was set to since it last rang. Any thread sets it, one waits for it."""

    def __init__(self) -> None:
        """Raises OSError where there is no such timer."""
        self._fd: int = _libc.timerfd_create(_CLOCK_MONOTONIC, _CLOEXEC | _NONBLOCK)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), f"timerfd_create: {os.strerror(ctypes.get_errno())}")
        self._lock = threading.Lock()
        self._at = math.inf
        self._timer = _Timer()

    def fileno(self) -> int:
        """Its descriptor, which can be read once it rings; -1 once it is closed."""
        return self._fd

    def by(self, at: float) -> None:
        """Ring at time.monotonic() ``at``, or before where it is set to that already."""
        with self._lock:
            if at >= self._at or self._fd < 0:
                return
            self._at = at
            self._timer.seconds, left = divmod(max(0, int(at * 1e9)), 1_000_000_000)
            self._timer.nanoseconds = max(left, 1)  # nothing at all would stop it
            _libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(self._timer), None)

    def now(self) -> None:
        """Ring at once."""
        self.by(time.monotonic())

    def wait(self) -> None:
        """Until it rings."""
        waiting = select.poll()
        waiting.register(self._fd, select.POLLIN)
        waiting.poll()
        self.rung()

    def rung(self) -> None:
        """Forget what it was set to, whether it has rung or not. What is set from here on rings again."""
        # Both under the lock: a time that is set between them would be read away, and what is later than it never set.
        with self._lock, contextlib.suppress(BlockingIOError):  # it never rang
            self._at = math.inf
            os.read(self._fd, 8)

    def close(self) -> None:
        """Give the descriptor back, once nobody waits any more. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
