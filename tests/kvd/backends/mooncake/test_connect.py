"""Connecting an engine to a peer, with an engine that is made up."""

import time
from typing import Any

import pytest

from kvd.backends.errors import WorkerUnreachable
from kvd.backends.mooncake.connect import connect
from kvd.backends.mooncake.mark import host_mark
from kvd.backends.mooncake.target import EngineTarget


class Raising:
    """An engine whose first post raises."""

    def __init__(self) -> None:
        self.mark = host_mark()
        self.destroyed = 0

    def post(self, *_: object) -> int:
        raise RuntimeError("no such device")

    def destroy(self) -> None:
        self.destroyed += 1


def test_a_post_that_raises_is_said_at_once_and_ends_the_engine() -> None:
    engine: Any = Raising()
    began = time.monotonic()
    with pytest.raises(
        WorkerUnreachable, match="could not be asked for its mark: RuntimeError: no such device"
    ):
        connect(engine, EngineTarget("127.0.0.1:1", "tcp", bytes(16).hex(), 4096), "p", 60.0)
    assert time.monotonic() - began < 30
    assert engine.destroyed == 1
