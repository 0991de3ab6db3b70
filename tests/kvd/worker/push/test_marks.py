"""Marks in the last step of a prompt: what a decoder that reads whole steps is told of before the step's end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from kvd.geometry.model import EngineGeometry
from kvd.geometry.rank import Rank
from kvd.worker.push.computed import Outgoing
from kvd.worker.push.marks import completes, mark_numbers
from tests.support import oracle, samples
from tests.support.no_threads import refuse_threads
from tests.support.rigs.bench import eventually
from tests.support.rigs.dense import BLOCK, REQUEST, announce, dense, ids, shrunk
from tests.support.rigs.send import SendRig, sending, step

FIRST, LAST = step({0: ids(1, 2)}, 32, 40), step(REQUEST.remote, 40, 40, held=32)


@pytest.fixture
def rig() -> Iterator[SendRig]:
    with sending(dense("p"), dense("d")) as made:
        made.fill(REQUEST.remote)
        yield made


def told(rig: SendRig, *layers: tuple[str, int]) -> bool:
    return rig.there() == set(layers)


@pytest.mark.parametrize(
    ("layers", "numbers"),
    [(0, set()), (1, set()), (2, {1}), (3, {2}), (4, {2, 3}), (16, {8, 13}), (24, {12, 20}), (80, {40, 65})],
)
def test_there_are_two_marks_and_none_after_the_last_layer(layers: int, numbers: set[int]) -> None:
    assert mark_numbers(layers) == numbers


@pytest.mark.parametrize(
    ("before", "now", "marked"),
    [
        (None, step({0: ids(1)}, 40, 40), False),  # a prompt of one step
        (None, step({0: ids(1)}, 40, 40, held=32), False),  # the rest was in the cache
        (step({0: ids(1)}, 16, 40), step({0: ids(1)}, 32, 40), False),  # not the last
        (step({0: ids(1)}, 32, 40), step({0: ids(1)}, 40, 40), True),
        (step({0: ids(1)}, 39, 40), step({0: ids(1)}, 40, 40), False),  # nothing is left to be hidden
        (step({0: ids(1)}, 32, 40), step({0: ids(1)}, 40, 40, again=True), False),
        (step({0: ids(1)}, 32, 40), step({0: ids(1)}, 40, 40, request_id="s"), False),
        (step({0: ids(1)}, 32, 40), step({}, 40, 40), False),
        (step({0: ids(1)}, 40, 40), step({0: ids(1)}, 40, 40), False),  # states, once it has ended
    ],
)
def test_marks_are_for_the_last_of_several_steps(before: object, now: object, marked: bool) -> None:
    assert completes(now, before) is marked  # type: ignore[arg-type]


def test_of_the_last_step_layers_are_offered_ahead_and_the_rest_when_blocks_are_certain_to_stay(
    rig: SendRig,
) -> None:
    announce(rig, window=b"")
    rig.run(FIRST)
    eventually(lambda: told(rig, ("a", 32), ("b", 32)))
    rig.begin(LAST)
    rig.hook("a")
    eventually(lambda: told(rig, ("a", 32), ("b", 32), ("a", 40)))
    rig.hook("b")
    rig.stepped()
    (part,) = rig.progress()[-1].there
    assert part.blocks is not None
    assert (part.layers, part.blocks.ids) == (("a",), (1, 2, 7))
    rig.keep()
    eventually(lambda: told(rig, ("a", 32), ("b", 32), ("a", 40), ("b", 40)))
    (part,) = rig.progress()[-1].there
    assert part.layers == ("b",)


def test_a_request_that_loses_its_blocks_after_a_mark_fails_whoever_reads_it(rig: SendRig) -> None:
    announce(rig, window=b"")
    rig.run(FIRST)
    rig.begin(LAST)
    rig.hook("a")
    eventually(lambda: ("a", 40) in rig.there())
    rig.begin(step({}, 0, 40, again=True))
    (cause,) = eventually(rig.failures)
    assert "preempted" in cause
    rig.run(step({0: ids(3, 4, 5)}, 40, 40), layers="ab")
    rig.keep()
    rig.end()
    assert ("b", 40) not in rig.there(), "a decoder that has everything would use what it read"


def test_who_takes_fewer_layers_than_were_marked_waits_for_one_of_them_too() -> None:
    """Of a pipeline's workers each has all of its layers before the prefiller's step is over."""
    deep = samples.llama(("a", "b", "c", "d"), heads=2, block=BLOCK)
    whole = shrunk(samples.engine("p", ("full", BLOCK, None, deep)))
    half = dense("d")  # a and b
    with sending(whole, half) as rig:
        rig.fill(REQUEST.remote)
        announce(rig, window=b"")
        rig.run(FIRST)
        rig.begin(LAST)
        for layer in "abc":
            rig.hook(layer)
        eventually(lambda: ("a", 40) in rig.there())
        announce(rig, name="y", window=b"")  # whatever it looks at, it looks at all
        rig.stepped()
        assert ("b", 40) not in rig.there()
        rig.keep()
        eventually(lambda: ("b", 40) in rig.there())


def test_states_are_withheld_with_the_last_layers() -> None:
    def hybrid(name: str) -> EngineGeometry:
        return shrunk(
            samples.engine(
                name,
                ("mamba", BLOCK, None, samples.gated_delta_net(("s",))),
                ("full", BLOCK, None, samples.llama(("a", "b"), heads=2, block=BLOCK)),
            )
        )

    request = oracle.Request(
        local={0: ids(3), 1: ids(9, 4, 5)}, remote={0: ids(6), 1: ids(1, 2, 7)}, tokens=40
    )
    with sending(hybrid("p"), hybrid("d")) as rig:
        rig.fill(request.remote)
        rig.announce(request.local, 40, window=b"")
        rig.run(step({1: ids(1, 2)}, 32, 40))
        rig.begin(step({1: ids(1, 2, 7)}, 40, 40, held=32))
        rig.hook("a")
        eventually(lambda: ("a", 40) in rig.there())
        rig.hook("b")
        rig.stepped()
        assert not {("b", 40), ("s", 40)} & rig.there()
        rig.begin(step(request.remote, 40, 40, held=40))
        rig.stepped()
        rig.end()
        eventually(lambda: {("a", 40), ("b", 40), ("s", 40)} <= rig.there())


class Device:
    """A stream: its events are reached in their order, when the test says so."""

    def __init__(self) -> None:
        self.events: list[threading.Event] = []
        self.asked = 0

    def record(self) -> Recorded:
        self.events.append(threading.Event())
        return Recorded(self, self.events[-1])


class Recorded:
    """One event of it, that a thread can wait for."""

    def __init__(self, device: Device, event: threading.Event) -> None:
        self.device, self.event = device, event

    def __call__(self) -> bool:
        self.device.asked += 1
        return self.event.is_set()

    def wait(self) -> None:
        self.event.wait()


def test_who_reads_is_woken_when_the_device_is_there_and_asks_nothing_before() -> None:
    device, woken = Device(), threading.Semaphore(0)
    here = Outgoing(device.record, hooks=2)
    here.announced("x", "d", Rank(), lambda **_: woken.release(), by_layer=False)
    for one in (FIRST, LAST):
        here.begin([one], [])
        for layer in "ab":
            here.saved(layer)
        here.stepped(("a", "b"))
    assert not woken.acquire(blocking=False)
    assert (len(device.events), device.asked) == (3, 0), "an event for each step and one for the mark"
    found = []
    for event in device.events[:2]:
        event.set()
        assert woken.acquire(timeout=10)
        looked = here.computed("x")
        assert looked is not None
        found.append(([looked.reached(layer) for layer in "ab"], sorted(looked.early)))
    assert found == [([32, 32], ["a"]), ([40, 32], ["a"])]
    here.stop()
    device.events[2].set()
    assert here.join(1e9)


def test_where_the_system_starts_no_thread_the_step_goes_on_and_its_end_wakes_whoever_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_threads(monkeypatch, "kvd-steps")
    woken: list[None] = []
    here = Outgoing(Device().record)
    here.announced("x", "d", Rank(), lambda **_: woken.append(None), by_layer=False)
    here.begin([FIRST], [])
    here.stepped(("a", "b"))
    assert not woken
    here.kept("x", "r", {})
    assert len(woken) == 1
    here.stop()
    assert here.join(0.0)


def test_who_has_declined_is_not_woken_for_what_the_device_does() -> None:
    device, woken = Device(), queue.Queue[str]()
    here = Outgoing(device.record)
    for decoder in ("declined", "d"):
        here.announced("x", decoder, Rank(), lambda decoder=decoder, **_: woken.put(decoder), by_layer=False)
    here.begin([FIRST], [])
    here.stepped(("a", "b"))
    here.settled("x", "declined", Rank())
    device.events[0].set()
    assert woken.get(timeout=10) == "d"
    here.stop()
    assert here.join(1e9)


def test_a_worker_that_declines_costs_the_step_no_event_for_a_layer(rig: SendRig) -> None:
    device, (worker,) = Device(), rig.workers
    outgoing = worker.half.pushing._outgoing
    outgoing._record_event = device.record
    rig.begin(FIRST)
    rig.withdraw()
    eventually(rig.quiesced)
    rig.hook("a")
    assert not device.events


def test_a_prompt_of_one_step_has_no_event_for_a_layer() -> None:
    device = Device()
    here = Outgoing(device.record, hooks=2)
    here.announced("x", "d", Rank(), lambda **_: None, by_layer=False)
    here.begin([step(REQUEST.remote, 40, 40)], [])
    for layer in "ab":
        here.saved(layer)
    assert not device.events


def test_what_the_step_before_told_of_is_not_told_again() -> None:
    device = Device()
    here = Outgoing(device.record)
    here.begin([FIRST], [])
    here.stepped(("a", "b"))
    here.begin([step({0: ids(1, 2)}, 36, 40, held=32)], [])
    assert len(device.events) == 1
