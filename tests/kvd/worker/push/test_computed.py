"""What is computed of a push, as those who send it look at it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvd.geometry.rank import Rank
from kvd.wire.identity import Endpoint
from kvd.wire.push import PushKey
from kvd.worker.orders import PushEnd
from kvd.worker.push import computed as outgoing
from kvd.worker.push.milestones import Computed
from kvd.worker.push.outgoing_transfer import MILESTONES
from kvd.worker.push.send_step import awaits_device
from kvd.worker.push.target import PushTarget, nothing
from kvd.worker.streams.event import StreamEvent
from tests.support.rigs.dense import ids
from tests.support.rigs.send import step

KEY = PushKey(transfer_id="x", prefiller="p", prefiller_endpoint=Endpoint(), decoder="d", rank=Rank())


def awaited(record: Callable[[], StreamEvent | None]) -> outgoing.Outgoing:
    """Transfers of which a decoder waits for "x", layer by layer."""
    made = outgoing.Outgoing(record)
    made.announced("x", "d", Rank(), lambda **_: None, by_layer=True)
    return made


def test_what_is_computed_is_worked_out_once_for_each_change() -> None:
    here = awaited(lambda: None)
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
    here = awaited(lambda: lambda: bool(there))
    here.begin([step({0: ids(1, 2)}, 16, 32)], [])
    here.saved("a")
    waiting = here.computed("x")
    assert waiting is not None
    assert (waiting.reached("a"), waiting.coming) == (0, 16)
    there.append(True)
    found = here.computed("x")
    assert found is not None
    assert (found.reached("a"), found.coming) == (16, 0)


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

    here = awaited(record)
    for reached in (16, 32):
        here.begin([step({0: ids(1, 2)}, reached, 32)], [])
        for layer in "abc":
            here.saved(layer)
    found = {}
    for come in (0, 2, 4, 6):
        asked.clear()
        looked = here.computed("x")
        assert looked is not None
        found[come] = [looked.reached(layer) for layer in "abc"], looked.coming, list(asked)
    assert found == {
        0: ([0, 0, 0], 16, [0]),
        2: ([16, 16, 0], 16, [0, 1, 2]),
        4: ([32, 16, 16], 32, [2, 3, 4]),
        6: ([32, 32, 32], 0, [4, 5]),
    }


def test_a_look_that_a_later_step_overtakes_tells_no_tokens_that_its_blocks_lack() -> None:
    """Of two decoders of a transfer each has a thread that looks."""
    meanwhile: list[Callable[[], object]] = []

    def record() -> StreamEvent:
        def ready() -> bool:
            while meanwhile:
                meanwhile.pop()()
            return True

        return ready

    here = awaited(record)

    def later_step() -> None:
        here.begin([step({0: ids(1, 2, 3)}, 48, 64)], [])
        here.stepped(("a",))
        looked.append(here.computed("x"))

    looked: list[Computed | None] = []
    here.begin([step({0: ids(1, 2)}, 32, 64)], [])
    here.stepped(("a",))
    meanwhile.append(later_step)
    looked.append(here.computed("x"))
    looked.append(here.computed("x"))
    found = [(len(one.blocks[0].ids), one.reached("a")) for one in looked if one is not None]
    assert found == [(3, 48), (2, 32), (3, 48)]


def test_of_a_request_that_begins_anew_nothing_is_there() -> None:
    here = awaited(lambda: None)
    here.begin([step({0: ids(1, 2)}, 16, 32)], [])
    here.saved("a")
    assert (before := here.computed("x")) is not None
    here.begin([step({0: ids(1, 2)}, 8, 32, again=True)], [])
    assert (found := here.computed("x")) is not None
    assert (before.reached("a"), found.reached("a")) == (16, 0)
    assert found.epoch != before.epoch


def test_what_nobody_looks_at_for_long_is_bounded_and_its_newest_counts() -> None:
    here = awaited(lambda: lambda: True)
    for number in range(1, 101):
        here.begin([step({0: ids(1, 2)}, number, 200)], [])
        for layer in "ab":
            here.saved(layer)
    assert len(here._transfers["x"].coming) == 2 * MILESTONES
    assert (found := here.computed("x")) is not None
    assert (found.reached("a"), found.reached("b"), found.coming) == (100, 100, 0)


@pytest.mark.parametrize(
    ("announced", "by_layer", "known", "events"),
    [
        ("never", False, {}, 1),
        ("before the step", False, {}, 1),
        ("before the step", True, {"a": 16, "b": 16}, 2),
        ("within the step", True, {"b": 16}, 2),
        ("and has its part", True, {}, 1),
    ],
)
def test_a_layer_costs_the_step_an_event_only_where_somebody_waits_for_single_layers(
    announced: str, by_layer: bool, known: dict[str, int], events: int
) -> None:
    made: list[None] = []
    here = outgoing.Outgoing(lambda: made.append(None))

    def announce() -> None:
        here.announced("x", "d", Rank(), lambda **_: None, by_layer=by_layer)

    if announced in ("before the step", "and has its part"):
        announce()
    if announced == "and has its part":
        here.settled("x", "d", Rank())
    here.begin([step({0: ids(1, 2)}, 16, 32)], [])
    here.saved("a")
    if announced == "within the step":
        announce()
    here.saved("b")
    assert (within := here.computed("x")) is not None
    here.stepped(("a", "b"))
    assert (after := here.computed("x")) is not None
    assert (within.layers, [after.reached(layer) for layer in "ab"], len(made)) == (known, [16, 16], events)


@pytest.mark.parametrize(
    ("window", "woken", "kept", "coming", "looks"),
    [
        (b"w", True, False, 32, True),
        (b"w", True, False, 0, False),
        (b"", False, False, 16, True),
        (b"", True, False, 16, False),
        (b"", False, False, 32, False),  # withheld until the scheduler has said that they stay
        (b"", True, True, 32, True),
    ],
)
def test_the_device_is_asked_only_for_what_could_be_sent(
    window: bytes, woken: bool, kept: bool, coming: int, looks: bool
) -> None:
    announce = msgspec.structs.replace(nothing(KEY), tokens=32, window=window)
    target = PushTarget(announce, 60.0)
    assert awaits_device(target, Computed(kept=kept, coming=coming), woken=woken) is looks


def test_who_reads_whole_steps_looks_once_at_a_prompt_of_one_step() -> None:
    """Each look takes a turn of the interpreter from the step that computes."""
    woken: list[str] = []
    here = outgoing.Outgoing(lambda: None)
    here.announced("x", "reads", Rank(), lambda **_: woken.append("reads"), by_layer=False)
    here.announced("x", "is written", Rank(), lambda **_: woken.append("is written"), by_layer=True)
    here.begin([step({0: ids(1, 2)}, 32, 32)], [])
    here.saved("a")
    here.stepped(("a",))
    assert woken == ["is written"] * 3
    here.kept("x", "r", {})
    assert woken[3:] == ["reads", "is written"]
    here.begin([], [PushEnd("x", "r", 60.0)])
    assert len(woken) == 5


@pytest.mark.parametrize("again", [False, True])
def test_who_reads_whole_steps_looks_after_each_of_several_and_at_once_where_one_begins_anew(
    again: bool,
) -> None:
    woken: list[bool] = []
    here = outgoing.Outgoing(lambda: None)
    here.announced("x", "d", Rank(), lambda *, urgent: woken.append(urgent), by_layer=False)
    here.begin([step({0: ids(1, 2)}, 16, 32)], [])
    assert woken == []
    here.stepped(("a",))
    assert woken == [True]
    here.begin([step({0: ids(1, 2)}, 32, 32, again=again)], [])
    here.stepped(("a",))
    assert woken == [True, True] if again else [True]
    here.begin([], [PushEnd("x", "r", 60.0)])
    assert len(woken) == (3 if again else 2)
