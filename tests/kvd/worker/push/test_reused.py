"""One transfer id for two requests, on either side: neither may take the other's blocks or words for its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kvd.geometry.rank import Rank
from kvd.vllm.errors import BadParams
from kvd.vllm.scheduler import transfer_ids
from kvd.worker.cause import ABORTED, code_of, text_of
from kvd.worker.orders import PushEnd, PushStep, StepOrders, StepOutcomes
from kvd.worker.push.computed import Outgoing
from tests.kvd.vllm.scheduler.test_push_claims import PARAMS, declined, decoder
from tests.support import oracle
from tests.support.rigs.bench import eventually
from tests.support.rigs.dense import REQUEST, dense, ids
from tests.support.rigs.half import Engine, Request, Step
from tests.support.rigs.send import SendRig, sending, step

OTHER = {0: ids(20, 21, 22)}
"""The second request's blocks on the prefiller."""


@pytest.fixture
def rig() -> Iterator[SendRig]:
    with sending(dense("p"), dense("d")) as made:
        made.fill(REQUEST.remote)
        yield made


def begun_anew(rig: SendRig, second: PushStep) -> None:
    """Between two steps the first request is aborted, and a second one is scheduled at once."""
    for worker in rig.workers:
        orders = StepOrders(pushes=[second], push_ends=[PushEnd("x", "r", 0.0, ABORTED)])
        worker.half.pushing.begin(orders)


# --- the prefiller ---


def test_no_two_requests_of_one_transfer_have_the_same_epoch() -> None:
    here, seen = Outgoing(lambda: None), []
    here.begin([step({0: ids(1, 2)}, 8, 16)], [])
    seen.append(here.epoch("x"))
    here.begin([step({0: ids(7, 8)}, 8, 16, request_id="s")], [PushEnd("x", "r", 0.0, ABORTED)])
    seen.append(here.epoch("x"))
    here.begin([step({0: ids(7, 8)}, 8, 16, request_id="s", again=True)], [])
    seen.append(here.epoch("x"))
    here.begin([], [PushEnd("x", "s", 0.0, ABORTED)])
    here.begin([step({0: ids(3, 4)}, 8, 16, request_id="t")], [])
    seen.append(here.epoch("x"))
    assert len(set(seen)) == len(seen)


def test_a_second_request_under_an_id_that_has_served_its_decoder_holds_no_blocks() -> None:
    """Decoders take an id once, so nobody would announce it again: its blocks stayed for all of `lease_seconds`."""

    def computed(made: Outgoing, request: str) -> set[str]:
        made.begin([step({0: ids(1, 2)}, 8, 8, request_id=request)], [])
        made.begin([], [PushEnd("x", request, 60.0)])
        return made.sent(time.monotonic())

    here, again = Outgoing(lambda: None), Outgoing(lambda: None)
    for made in (here, again):
        made.announced("x", "d", Rank(), lambda **_: None, by_layer=True)
        made.workers("x", "d", frozenset({Rank()}))
        assert computed(made, "r") == set()
        made.settled("x", "d", Rank())
        assert made.sent(time.monotonic()) == {"r"}
    assert computed(here, "s") == {"s"}
    assert computed(here, "t") == {"t"}
    again.announced("x", "another decoder", Rank(), lambda **_: None, by_layer=True)
    assert computed(again, "s") == set(), "somebody waits for it"


def test_who_reads_the_blocks_of_the_first_request_is_told_to_stop(rig: SendRig) -> None:
    rig.announce(REQUEST.local, REQUEST.tokens, window=b"")
    rig.run(step({0: ids(1, 2)}, 32, 40))
    eventually(lambda: rig.there() == {("a", 32), ("b", 32)})
    begun_anew(rig, step(OTHER, 40, 40, request_id="s"))
    (cause,) = eventually(rig.failures)
    assert "began it anew" in cause


def test_what_was_under_way_of_the_first_request_is_sent_again_of_the_second(rig: SendRig) -> None:
    rig.announce(REQUEST.local, REQUEST.tokens)
    (worker,) = rig.workers
    worker.faults.hold |= {0}
    rig.run(step(REQUEST.remote, 32, 40))
    eventually(lambda: worker.gates.opened)
    begun_anew(rig, step(OTHER, 40, 40, request_id="s"))
    for region in worker.memory.regions:  # the first one's blocks are somebody else's now
        region[:] = 7
    rig.fill(OTHER)
    worker.faults.release(0)
    rig.stepped()
    rig.end(request_id="s")
    eventually(lambda: rig.all_sent("s"))
    assert rig.as_pulled(oracle.Request(REQUEST.local, OTHER, 40))


def test_who_announces_what_was_withdrawn_hears_at_once_that_nothing_comes(rig: SendRig) -> None:
    """It would wait for its time to run out."""
    rig.withdraw()
    eventually(rig.quiesced)
    before = len(rig.progress())
    rig.announce(REQUEST.local, REQUEST.tokens)
    eventually(lambda: len(rig.progress()) > before)
    assert rig.progress()[-1].quiesced


# --- the decoder ---


def is_loaded(engine: Engine) -> Request:
    """The first request, whose load is ordered."""
    first = engine.arrive(PARAMS)
    engine.answer()
    assert engine.half.matched_tokens(first, 0) == (10, True)
    engine.half.allocated(first, ([1, 2, 3],), 10)
    assert [order.transfer_id for order in engine.half.step_orders().loads] == ["x"]
    return first


def aborted(engine: Engine, second: Request) -> None:
    engine.half.finished(second, ([],), completed=False)


def cached(engine: Engine, second: Request) -> None:
    assert engine.half.matched_tokens(second, 10) == (0, False)


def computed(engine: Engine, second: Request) -> None:
    assert engine.half.matched_tokens(second, 0) == (0, False)


def unasked(engine: Engine, second: Request) -> None:
    assert engine.half.step_orders(Step({second.request_id: 10})).declined == []


@pytest.mark.parametrize("ends", [aborted, cached, computed, unasked])
def test_nothing_that_becomes_of_a_second_request_ends_the_first_ones_push(
    ends: Callable[[Engine, Request], None],
) -> None:
    engine = decoder()
    is_loaded(engine)
    ends(engine, engine.arrive(PARAMS, "s"))
    assert declined(engine) == []


def test_a_second_request_is_refused_before_the_first_ones_load_is_ordered() -> None:
    engine = decoder()
    engine.arrive(PARAMS)
    engine.answer()
    second = engine.arrive(PARAMS, "s")
    assert engine.half.matched_tokens(second, 0) == (0, False), "it need not wait to be computed"
    claim = engine.half._claims.get("s")
    assert claim is not None
    assert code_of(claim.cause) == "BAD_PARAMS"
    assert "transfer x of prefiller p is or was another request's" in text_of(claim.cause)
    assert declined(engine) == []


def test_under_policy_fail_the_second_request_fails_and_its_worker_has_nothing_to_decline() -> None:
    engine = decoder(policy="fail")
    is_loaded(engine)
    second = engine.arrive(PARAMS, "s")
    count, _ = engine.half.matched_tokens(second, 0)
    assert count
    engine.half.allocated(second, ([4, 5, 6],), count)
    (order,) = engine.half.step_orders().loads
    assert (code_of(order.refused), order.transfer_id) == ("BAD_PARAMS", "")


@pytest.mark.parametrize("loaded", [True, False])
def test_an_id_stays_its_requests_when_that_is_over(loaded: bool) -> None:
    engine = decoder()
    if loaded:
        is_loaded(engine)
        engine.half.loads_ended({"r"}, StepOutcomes())
    else:
        aborted(engine, engine.arrive(PARAMS))
        assert declined(engine) == ["x"]
    again = engine.arrive(PARAMS, "s")
    assert engine.half.matched_tokens(again, 0) == (0, False)
    assert declined(engine) == []


def test_another_prefiller_may_be_asked_under_the_same_id() -> None:
    engine = decoder()
    aborted(engine, engine.arrive(PARAMS))
    other = engine.arrive({**PARAMS, "remote_engine_id": "q"}, "s")
    assert engine.half.matched_tokens(other, 0) == (None, False)


def test_an_id_is_forgotten_in_time_and_never_while_it_is_held() -> None:
    names, late = transfer_ids.TransferIds(), transfer_ids.KEPT + 1
    names.take("p", "x", 0.0)
    with pytest.raises(BadParams):
        names.take("p", "x", late)
    names.end("p", "x", late)
    with pytest.raises(BadParams):
        names.take("p", "x", late + 1)
    names.take("p", "x", 2 * late + 1)
