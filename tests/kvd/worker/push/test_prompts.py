"""A prefiller compares its prompt with the decoder's before it writes or tells anything, in push."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.wire.handshake import GetPeer
from tests.kvd.vllm.scheduler.test_push_claims import PARAMS, declined, decoder
from tests.support.rigs.bench import KEY, eventually, prompt
from tests.support.rigs.dense import REQUEST, dense
from tests.support.rigs.desk import KEYLESS
from tests.support.rigs.half import HYBRID
from tests.support.rigs.send import SendRig, sending, step

MINE, OTHER = "digest of the prefiller's", "digest of another"
WAYS = pytest.mark.parametrize("window", [None, b""], ids=["written", "read"])


@pytest.fixture
def rig() -> Iterator[SendRig]:
    with sending(dense("p"), dense("d")) as made:
        made.fill(REQUEST.remote)
        yield made


def announce(rig: SendRig, window: bytes | None, digest: str, tokens: int = REQUEST.tokens) -> None:
    rig.digest = digest
    rig.announce(REQUEST.local, tokens, window=window)


@WAYS
def test_nothing_of_another_prompt_is_written_or_told(rig: SendRig, window: bytes | None) -> None:
    announce(rig, window, OTHER)
    rig.run(step(REQUEST.remote, 32, 40, digest=MINE))
    (progress,) = eventually(lambda: [p for p in rig.progress() if p.failed])
    assert progress.code == "PROMPT_MISMATCH"
    assert "the 40 tokens of the prefiller's prompt are not those of the decoder's" in progress.failed
    assert progress.quiesced, "the decoder need not wait for anybody else"
    rig.run(step(REQUEST.remote, 40, 40, held=32, digest=MINE))
    rig.end()
    eventually(lambda: rig.all_sent("r"))
    assert rig.there() == set()
    assert rig.workers[0].gates.opened == 0


@WAYS
def test_it_is_found_also_where_the_announcement_comes_late(rig: SendRig, window: bytes | None) -> None:
    rig.run(step(REQUEST.remote, 40, 40, digest=MINE))
    rig.end()
    announce(rig, window, OTHER)
    eventually(rig.failures)
    assert rig.there() == set()


@WAYS
def test_a_decoder_that_has_no_digest_is_no_equal(rig: SendRig, window: bytes | None) -> None:
    announce(rig, window, "")
    rig.run(step(REQUEST.remote, 40, 40, digest=MINE))
    (progress,) = eventually(lambda: [p for p in rig.progress() if p.failed])
    assert progress.code == "PROMPT_MISMATCH"


@WAYS
def test_another_length_is_another_prompt(rig: SendRig, window: bytes | None) -> None:
    announce(rig, window, MINE, tokens=41)
    rig.run(step(REQUEST.remote, 40, 40, digest=MINE))
    (progress,) = eventually(lambda: [p for p in rig.progress() if p.failed])
    assert progress.code == "PROMPT_MISMATCH"


@WAYS
def test_the_same_prompt_is_sent(rig: SendRig, window: bytes | None) -> None:
    announce(rig, window, MINE)
    rig.run(step(REQUEST.remote, 40, 40, digest=MINE))
    rig.end()
    eventually(lambda: rig.there() == {("a", 40), ("b", 40)})


def test_a_preempted_request_has_the_same_prompt_when_it_goes_on(rig: SendRig) -> None:
    announce(rig, None, MINE)
    rig.run(step(REQUEST.remote, 32, 40, digest=MINE))
    rig.begin(step({}, 0, 40, again=True, digest=MINE))
    rig.run(step(REQUEST.remote, 40, 40, digest=MINE))
    eventually(lambda: rig.there() == {("a", 40), ("b", 40)})
    assert rig.failures() == []


# --- the decoder's scheduler ---


@pytest.mark.parametrize(("groups", "tokens"), [(None, 10), (HYBRID, 9)])
def test_the_order_carries_the_digest_of_what_is_to_be_pushed(groups: object, tokens: int) -> None:
    engine = decoder(groups)
    request = engine.arrive(PARAMS)
    engine.answer()
    assert engine.half.matched_tokens(request, 0) == (tokens, True)
    engine.half.allocated(request, ([0, 30], [1, 2]), tokens)
    (order,) = engine.half.step_orders().loads
    assert order.digest == prompt(range(10)).digest(KEY, tokens)


def test_without_the_prefillers_key_nothing_is_announced() -> None:
    engine = decoder(known=False)
    request = engine.arrive(PARAMS)
    engine.script.asked(GetPeer)[0].answer(KEYLESS)
    assert engine.half.matched_tokens(request, 0) == (0, False)
    assert declined(engine) == ["x"], "the prefiller need not wait for it"
