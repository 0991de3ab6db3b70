"""What a prefilling worker tells its own kvd of a push that belongs to a trace: once, with the last word."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from tests.support.rigs.bench import eventually
from tests.support.rigs.dense import REQUEST, announce, dense
from tests.support.rigs.send import SendRig, sending, step

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def rig() -> Iterator[SendRig]:
    with sending(dense("p"), dense("d")) as made:
        made.fill(REQUEST.remote)
        yield made


def pushed(rig: SendRig, traceparent: str) -> None:
    announce(rig)
    for reached, held in ((32, 0), (40, 32)):
        one = step(REQUEST.remote, reached, 40, held=held)
        rig.run(dataclasses.replace(one, traceparent=traceparent))
    rig.end()
    eventually(lambda: rig.all_sent("r"))


def test_the_last_word_has_when_it_was_announced_and_sent(rig: SendRig) -> None:
    pushed(rig, PARENT)
    (sent,) = [told.sent for told in rig.progress() if told.sent is not None]
    assert rig.progress()[-1].sent == sent
    assert (sent.traceparent, sent.request_id) == (PARENT, "r")
    assert 0.0 <= sent.moments["first"] <= sent.moments["last"] <= sent.moments["ended"]
    assert sent.started > 0


def test_a_push_of_no_trace_tells_nothing(rig: SendRig) -> None:
    pushed(rig, "")
    assert [told.sent for told in rig.progress() if told.sent is not None] == []


def test_one_that_failed_is_told_of_with_its_cause(rig: SendRig) -> None:
    announce(rig)
    rig.run(dataclasses.replace(step(REQUEST.remote, 32, 40), traceparent=PARENT))
    eventually(lambda: rig.workers[0].gates.opened)
    rig.end(cause="aborted")
    (told,) = eventually(lambda: [one for one in rig.progress() if one.sent is not None])
    assert told.failed
