"""When a sender looks: at once where somebody waits for it, else together with what is computed next.

One by one, the looks, messages and reads of a step's layers cost the step more than their bytes do.
"""

from __future__ import annotations

import math
import threading
import time

POLL, POLL_SLOW, FAST_FOR = 50e-6, 1e-3, 0.02
"""Seconds between looks while something is under way: quick while it is young and the last of its request.

What is sent while more is computed needs no hurry, and each look takes the GIL from the step that computes it.
"""
PACE = 4e-3
"""Seconds between two looks at prompts of which more is yet to be computed."""


class Looks:
    """The bell of one sender's thread, which alone waits; any thread rings."""

    def __init__(self) -> None:
        self._rung = threading.Event()
        self._urgent = threading.Event()
        self._last = -math.inf

    def ring(self, *, urgent: bool) -> None:
        """There is something to look at; where it is not ``urgent`` that may be `PACE` after the look before."""
        if urgent:
            self._urgent.set()
        self._rung.set()

    def wait(self, pause: float | None) -> None:
        """Wait for the next look: until it rings, or for so many seconds at most."""
        if self._rung.wait(pause):
            self._urgent.wait(self._last + PACE - time.monotonic())
        # Cleared before the look: the next one is for what comes during it.
        self._urgent.clear()
        self._rung.clear()
        self._last = time.monotonic()
