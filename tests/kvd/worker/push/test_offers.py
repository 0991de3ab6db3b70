"""What a prefilling worker offers to a decoder that reads by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.worker.push import target
from tests.support.rigs.bench import eventually
from tests.support.rigs.dense import REQUEST, announce, dense, ids
from tests.support.rigs.send import SendRig, sending, step


@pytest.fixture
def rig() -> Iterator[SendRig]:
    with sending(dense("p"), dense("d")) as made:
        made.fill(REQUEST.remote)
        yield made


# --- a decoder that reads by itself ---


def test_layers_are_offered_with_the_blocks_they_stand_in(rig: SendRig) -> None:
    announce(rig, window=b"")
    rig.run(step({0: ids(1, 2)}, 32, 40))
    eventually(lambda: rig.there() == {("a", 32), ("b", 32)})
    (part, *_) = rig.progress()[0].there
    assert part.blocks is not None
    assert (part.blocks.group, part.blocks.first, part.blocks.ids) == (0, 0, (1, 2))
    assert rig.workers[0].gates.opened == 0


def test_the_end_is_offered_when_blocks_are_certain_to_stay_and_they_stay_until_it_is_done(
    rig: SendRig,
) -> None:
    announce(rig, window=b"")
    rig.run(step(REQUEST.remote, 40, 40))
    announce(rig, name="y", window=b"")
    rig.run(step(REQUEST.remote, 32, 40, name="y", request_id="s"))
    eventually(lambda: len(rig.there(name="y")) == 2)
    assert not rig.there()
    rig.end()
    eventually(lambda: rig.there() == {("a", 40), ("b", 40)})
    assert rig.sent() == [set()]
    rig.done()
    eventually(lambda: rig.all_sent("r"))


def test_the_schedulers_word_ahead_of_its_step_is_enough_for_that(rig: SendRig) -> None:
    announce(rig, window=b"")
    rig.run(step(REQUEST.remote, 40, 40))
    for name, request in (("x", "another"), ("unknown", "r")):
        rig.keep(name, request)
    assert rig.workers[0].half.pushing._outgoing.computed("x") is not None
    assert not rig.there()
    rig.keep()
    eventually(lambda: rig.there() == {("a", 40), ("b", 40)})
    rig.done()
    eventually(lambda: not rig.workers[0].half.pushing._outgoing._owed["x"]["d"].waiting)
    assert rig.sent() == [set()], "vLLM hears of it when the request has ended"
    rig.end()
    eventually(lambda: rig.all_sent("r"))


def test_a_preempted_request_fails_whoever_reads_it(rig: SendRig) -> None:
    announce(rig, window=b"")
    rig.run(step(REQUEST.remote, 32, 40))
    eventually(rig.there)
    rig.begin(step({}, 0, 40, again=True))
    (cause,) = eventually(rig.failures)
    assert "preempted" in cause


def test_blocks_that_are_read_stay_until_the_reader_has_heard(
    rig: SendRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "READS_END", 1.5)
    announce(rig, window=b"")
    rig.run(step(REQUEST.remote, 40, 40))
    rig.end(seconds=0.05)
    eventually(lambda: (rig.sent(), rig.failures())[1])
    assert rig.sent() == [set()]
    eventually(lambda: rig.all_sent("r"))


def test_a_reader_that_withdraws_frees_the_blocks(rig: SendRig) -> None:
    announce(rig, window=b"")
    rig.run(step(REQUEST.remote, 40, 40))
    rig.end()
    eventually(rig.there)
    rig.withdraw()
    eventually(lambda: rig.all_sent("r"))
    assert rig.quiesced()
