"""A device's stream whose marks are reached when a test says so."""

from __future__ import annotations


class Device:
    """A stream: marks are reached when the test says so."""

    def __init__(self) -> None:
        self.queued = self.done = self.asked = 0
        self.broken = False

    def mark(self) -> object:
        self.queued += 1
        at = self.queued

        def reached() -> bool:
            self.asked += 1
            if self.broken:
                raise RuntimeError("an illegal memory access was encountered")
            return self.done >= at

        return reached
