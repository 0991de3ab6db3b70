"""What is computed of a push, as those who send it look at it."""

from __future__ import annotations

from kvd.worker.orders import PushEnd
from kvd.worker.push import computed as outgoing
from tests.support.rigs.dense import ids
from tests.support.rigs.send import step


def test_what_is_computed_is_worked_out_once_for_each_change() -> None:
    here = outgoing.Outgoing(lambda: None)
    here.begin([step({0: ids(1, 2)}, 16, 32)], [])
    before = here.computed("x")
    assert before is here.computed("x")

    here.saved("a")
    after = here.computed("x")
    assert after is not None
    assert (after is before, after.reached("a")) == (False, 16)

    here.begin([], [PushEnd("x", "r", 60.0)])
    assert (ended := here.computed("x")) is not None
    assert ended.kept


def test_what_waits_for_the_device_is_looked_at_anew_each_time() -> None:
    there: list[bool] = []
    here = outgoing.Outgoing(lambda: lambda: bool(there))
    here.begin([step({0: ids(1, 2)}, 16, 32)], [])
    here.saved("a")
    waiting = here.computed("x")
    assert waiting is not None
    assert (waiting.reached("a"), waiting.behind) == (0, True)
    there.append(True)
    found = here.computed("x")
    assert found is not None
    assert (found.reached("a"), found.behind) == (16, False)
