"""A system that starts no further thread."""

from __future__ import annotations

import threading

import pytest


def refuse_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From now on those whose names begin so are refused, with Python's own words."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
