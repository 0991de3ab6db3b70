"""What is computed of a push, as those who send it look at it."""

from __future__ import annotations

from kvd.worker.orders import PushEnd
from kvd.worker.push import computed as outgoing
from kvd.worker.stream_event import StreamEvent
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


def test_what_is_kept_has_its_states_ahead_of_the_step_that_says_so() -> None:
    here = outgoing.Outgoing(lambda: None)
    here.begin([step({1: ids(1, 2)}, 32, 32)], [])
    here.kept("x", "r", {0: ids(9)})
    told = here.computed("x")
    assert told is not None
    assert (told.kept, told.reached("state"), [told.blocks[g].ids.tolist() for g in (0, 1)]) == (
        True,
        32,
        [[9], [1, 2]],
    )
    here.begin([step({1: ids(3)}, 8, 32, again=True)], [])
    anew = here.computed("x")
    assert anew is not None
    assert (anew.kept, sorted(anew.blocks)) == (False, [1])


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


def test_a_look_asks_of_what_is_new_only_and_no_further_than_the_device_has_come() -> None:
    made: list[int] = []
    asked: list[int] = []
    come = 0

    def record() -> StreamEvent:
        made.append(number := len(made))

        def ready() -> bool:
            asked.append(number)
            return number < come

        return ready

    here = outgoing.Outgoing(record)
    for reached in (16, 32):
        here.begin([step({0: ids(1, 2)}, reached, 32)], [])
        for layer in "abc":
            here.saved(layer)
    found = {}
    for come in (0, 2, 4, 6):
        asked.clear()
        looked = here.computed("x")
        assert looked is not None
        found[come] = [looked.reached(layer) for layer in "abc"], looked.behind, list(asked)
    assert found == {
        0: ([0, 0, 0], True, [0]),
        2: ([16, 16, 0], True, [0, 1, 2]),
        4: ([32, 16, 16], True, [2, 3, 4]),
        6: ([32, 32, 32], False, [4, 5]),
    }


def test_of_a_request_that_begins_anew_nothing_is_there() -> None:
    here = outgoing.Outgoing(lambda: None)
    here.begin([step({0: ids(1, 2)}, 16, 32)], [])
    here.saved("a")
    assert (before := here.computed("x")) is not None
    here.begin([step({0: ids(1, 2)}, 8, 32, again=True)], [])
    assert (found := here.computed("x")) is not None
    assert (before.reached("a"), found.reached("a")) == (16, 0)
    assert found.epoch != before.epoch


def test_what_nobody_looks_at_for_long_is_bounded_and_its_newest_counts() -> None:
    here = outgoing.Outgoing(lambda: lambda: True)
    for number in range(1, 101):
        here.begin([step({0: ids(1, 2)}, number, 200)], [])
        for layer in "ab":
            here.saved(layer)
    assert len(here._transfers["x"].coming) == 2 * outgoing.MILESTONES
    assert (found := here.computed("x")) is not None
    assert (found.reached("a"), found.reached("b"), found.behind) == (100, 100, False)
