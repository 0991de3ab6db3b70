"""Events of a device's stream are made once and recorded again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvd.vllm.memory.streams import event_recorder


class Event:
    """One of a device that has not come there before it is told so."""

    made: list[Event] = []  # noqa: RUF012 - of all of them

    def __init__(self, *_: Any) -> None:
        self.recorded = 0
        self.happened = False
        Event.made.append(self)

    def record(self) -> None:
        self.recorded += 1
        self.happened = False

    def query(self) -> bool:
        return self.happened


def test_an_event_that_nobody_looks_at_any_more_is_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(Event, "made", [])
    record = event_recorder("xpu")
    first, second = record(), record()
    assert first is not None
    assert second is not None
    assert len(Event.made) == 2, "of one that is looked at nothing changes"
    Event.made[0].happened = True
    assert (first(), second()) == (True, False)
    del first
    third = record()
    assert third is not None
    assert [event.recorded for event in Event.made] == [2, 1]
    assert not third(), "it counts from now on"
