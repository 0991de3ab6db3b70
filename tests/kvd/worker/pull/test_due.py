"""When the thread looks at a load: at the time that its lane gave, where it gave one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvd.backends.contract import State, Transfer
from kvd.backends.memory import MemoryLane
from kvd.worker.pull.looks import EARLY
from kvd.worker.settings import ConnectorSettings
from tests.support.rigs.bench import order, prefill, ready
from tests.support.rigs.pull import Rig

TAKES = 0.004


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(settings=ConnectorSettings(backend="memory", probe=False))
    made.script.push(ready(made.card))
    yield made
    made.close()


def test_a_load_is_looked_at_from_shortly_before_it_is_due(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    early: list[float] = []
    submit, poll = MemoryLane.submit, MemoryLane.poll

    def submitting(lane: MemoryLane, *arguments: Any) -> Transfer:
        transfer = submit(lane, *arguments)
        transfer.due = time.monotonic() + TAKES
        return transfer

    def polling(lane: MemoryLane, transfer: Transfer) -> State:
        if time.monotonic() < transfer.due:
            early.append(transfer.due - time.monotonic())
            return State.PENDING
        return poll(lane, transfer)

    monkeypatch.setattr(MemoryLane, "submit", submitting)
    monkeypatch.setattr(MemoryLane, "poll", polling)
    rig.start(order(prefill(((5, 6, 7, 8),), tokens=15), (1, 2, 3, 4)))
    assert rig.results().failed == set()
    assert rig.same((1, 2, 3, 4), (5, 6, 7, 8))
    assert sum(left > 2 * EARLY for left in early) <= 1, "once right after it was posted"
