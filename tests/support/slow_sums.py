"""A worker that adds up its blocks only when a test lets it."""

from __future__ import annotations

import threading
from typing import Any

from kvd.topology.checksums.sums import InMemory

LONG = 30.0


class Slow:
    """Adds up when it is let."""

    def __init__(self, inner: InMemory) -> None:
        self.inner, self.go, self.chunk = inner, threading.Event(), inner.chunk

    def sums(self, *args: Any) -> Any:
        assert self.go.wait(LONG)
        return self.inner.sums(*args)
