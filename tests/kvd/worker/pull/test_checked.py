"""Reads of a prefix cache: nothing of them is reported, and so used, before the holder said that it still held it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvd.client.errors import TimedOut
from kvd.wire.identity import Endpoint
from kvd.wire.prefix import CheckPrefix, PrefixKept
from kvd.wire.reply import Ok
from kvd.worker.cause import SHUTTING_DOWN
from kvd.worker.orders import LoadOrder
from tests.support.rigs.bench import GENERATION, Asked, eventually, order, prefill, ready
from tests.support.rigs.pull import ELEMENTS, Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    made.script.push(ready(made.card))
    yield made
    made.close()


def checked() -> LoadOrder:
    return replace(order(prefill(((5, 6),)), (2, 9)), checked=True, reader="reader")


def question(rig: Rig) -> Asked:
    """What the holder is asked, once all has come."""
    return eventually(lambda: rig.script.asked(CheckPrefix))[0]


def test_what_was_read_is_reported_once_its_holder_vouches_for_it(rig: Rig) -> None:
    one = checked()
    rig.start(one)
    asked = question(rig)
    where = Endpoint(one.prefill.host, one.prefill.port)
    assert asked.message == CheckPrefix(
        engine_id=one.prefill.engine_id,
        generation=GENERATION,
        reader="reader",
        endpoint=where,
        bytes=2 * 2 * ELEMENTS * 2,  # of two blocks in two layers
    )
    assert rig.same((2, 9), (5, 6))
    assert not rig.decoder.results().received
    asked.future.set_result(PrefixKept(kept=True))
    results = rig.decoder.results()
    assert (results.received, results.bad_blocks) == ({"d-1"}, set())


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (PrefixKept(kept=False, reason="it was reset"), "PREFIX_LOST"),
        (Ok(), "PREFIX_LOST"),
        (TimedOut("no answer within 2 s"), "PEER_AWAY"),
    ],
    ids=["lost", "nonsense", "silence"],
)
def test_of_what_nobody_vouches_for_nothing_is_used(
    rig: Rig, answer: PrefixKept | Ok | TimedOut, code: str
) -> None:
    rig.start(checked())
    asked = question(rig)
    if isinstance(answer, TimedOut):
        asked.future.set_exception(answer)
    else:
        asked.future.set_result(answer)
    results = rig.decoder.results()
    assert (results.received, results.failed, results.bad_blocks) == ({"d-1"}, {"d-1"}, {2, 9})
    outcomes = rig.decoder.outcomes()
    assert outcomes is not None
    assert (outcomes.loads["d-1"].code, outcomes.prefixes) == (code, {"d-1": 0})  # type: ignore[union-attr]


def test_a_read_that_is_a_miss_meanwhile_is_reported_once(rig: Rig) -> None:
    """As where the engine goes to sleep: its loads end, whoever is asked about them."""
    rig.start(checked())
    asked = question(rig)
    load = rig.decoder.loads.begun["d-1"]
    rig.decoder._ends.refuse(load, SHUTTING_DOWN)
    asked.future.set_result(PrefixKept(kept=True))
    results = rig.decoder.results()
    assert (results.received, results.bad_blocks) == ({"d-1"}, {2, 9})
    assert not rig.decoder.results().received
