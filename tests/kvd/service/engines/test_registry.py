"""The registry by itself: who waits for an engine, and for how long."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import pytest

from kvd.service.engines.local_engine import Client
from kvd.service.engines.registry import Registry
from kvd.service.sockets.events import Events
from tests.support.daemons import facts, worker


@pytest.mark.parametrize("wait", ["wait_ready", "wait_up"])
def test_who_asks_while_kvd_settles_is_given_an_engine_that_comes_later(
    monkeypatch: pytest.MonkeyPatch, wait: str
) -> None:
    """It asks in the last moment: kvd has settled when it looks again, and the engine comes after that."""
    registry = Registry(Events(None, Counter()), settled=math.inf)
    card = worker(facts("e")).card
    looks = iter(("settled", "registered"))

    async def pause(_seconds: float) -> None:
        if next(looks) == "settled":
            registry.settled = 0.0
            return
        registry.register(Client("worker", card.engine, "w", 1, b"w", rank=card.rank, card=card))
        registry.register(Client("scheduler", card.engine, "s", 1, b"s"))

    monkeypatch.setattr(asyncio, "sleep", pause)
    engine = asyncio.run(getattr(registry, wait)("e", 30.0))
    assert (engine.state, engine.up) == ("ready", True)
