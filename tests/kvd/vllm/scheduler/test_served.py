"""What a scheduler counts of its requests, once each, and when kvd is told."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvd.client.errors import ClientError
from kvd.client.session import SessionState
from kvd.vllm.memory.groups import GroupFacts
from kvd.vllm.scheduler.half import SchedulerHalf
from kvd.vllm.scheduler.served import Served
from kvd.wire.outcomes import MOST_COUNTS, OutcomeCount, ReportOutcomes
from kvd.wire.reply import Ok
from kvd.worker.orders import StepOutcomes
from kvd.worker.settings import ConnectorSettings
from tests.support.rigs.bench import Script, facts, why
from tests.support.rigs.half import HYBRID, LLAMA, PEER, PREFILL_HERE, Engine, Request, from_prefiller


class Placed(Engine):
    """An engine of a role."""

    def __init__(self, role: Any, groups: Sequence[GroupFacts] = LLAMA, **settings: Any) -> None:
        self.script = Script()
        mine = msgspec.structs.replace(facts("e", len(groups)), role=role)
        self.half = SchedulerHalf(ConnectorSettings(**settings), mine, groups, "recompute", self.script.open)
        self.script.push(PEER)


def served(engine: Engine) -> set[tuple[str, str, int, int]]:
    """What kvd was told last."""
    reports = engine.script.told(ReportOutcomes)
    return {(n.outcome, n.code, n.requests, n.tokens) for n in reports[-1].totals} if reports else set()


def loads(engine: Engine, request: Request, computed: int = 0) -> None:
    """vLLM's calls up to the end of the request's load."""
    engine.answer()
    count, _ = engine.half.matched_tokens(request, computed)
    assert count
    engine.half.allocated(request, ((1, 2, 3),), count)


# --- decoding ---


def test_a_load_counts_with_the_tokens_that_came() -> None:
    engine = Placed("decode")
    request = engine.arrive(from_prefiller())
    loads(engine, request, computed=4)
    engine.half.loads_ended({"r"}, StepOutcomes({"r": None}))
    assert served(engine) == {("loaded", "", 1, 6)}


def test_a_load_that_missed_counts_with_the_tokens_that_are_computed_again() -> None:
    engine = Placed("decode")
    request = engine.arrive(from_prefiller())
    loads(engine, request)
    engine.half.loads_ended({"r"}, StepOutcomes({"r": why("the wire broke")}, prefixes={"r": 4}))
    [(outcome, _, requests, tokens)] = served(engine)
    assert (outcome, requests, tokens) == ("missed", 1, 6)


def test_params_that_cannot_be_used_count_as_refused_and_once() -> None:
    engine = Placed("decode")
    request = engine.arrive(from_prefiller() | {"kvd_generation": ""})
    for _ in range(3):
        assert engine.half.matched_tokens(request, 0) == (0, False)
    [(outcome, _, requests, _)] = served(engine)
    assert (outcome, requests) == ("refused", 1)


def test_a_prompt_that_is_cached_here_needs_no_load() -> None:
    engine = Placed("decode")
    request = engine.arrive(from_prefiller())
    engine.answer()
    assert engine.half.matched_tokens(request, 10) == (0, False)
    assert served(engine) == {("cached", "", 1, 0)}


def test_a_load_that_vllm_does_not_take_counts_as_unused() -> None:
    engine = Placed("decode")
    request = engine.arrive(from_prefiller())
    engine.answer()
    assert engine.half.matched_tokens(request, 4) == (6, True)
    engine.half.allocated(request, ((1, 2, 3),), 0)
    assert served(engine) == {("unused", "", 1, 6)}


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_a_request_that_neither_brings_nor_wants_a_prefill_counts_with_what_is_computed(role: str) -> None:
    engine = Placed(role)
    request = engine.arrive(None)
    for _ in range(3):  # vLLM asks again while there is no room
        engine.half.matched_tokens(request, 4)
    engine.half.finished(request, ((1,),), completed=True)
    assert served(engine) == {("plain", "", 1, 6)}


def test_params_that_ask_for_nothing_here_are_told_apart() -> None:
    engine = Placed("decode")
    engine.half.matched_tokens(engine.arrive({"ttl": 3}), 0)
    engine.half.matched_tokens(engine.arrive({"do_remote_prefill": False}, "s"), 0)
    assert served(engine) == {("plain", "OTHER_PARAMS", 2, 20)}


def test_what_is_remembered_of_a_request_ends_with_it() -> None:
    engine = Placed("decode")
    for n in range(100):
        request = engine.arrive(None, f"r{n}")
        engine.half.matched_tokens(request, 0)
        engine.half.finished(request, ((),), completed=True)
    assert engine.half._served._decided == set()
    assert served(engine) == {("plain", "", 100, 1000)}


def test_a_load_that_ends_after_its_request_leaves_nothing_behind() -> None:
    engine = Placed("decode")
    request = engine.arrive(from_prefiller())
    loads(engine, request)
    engine.half.finished(request, ((1, 2, 3),), completed=False)
    engine.half.loads_ended({"r"}, StepOutcomes({"r": None}))
    assert engine.half._served._decided == set()


# --- prefilling ---


def finish(
    engine: Engine,
    *,
    params: dict[str, Any] = PREFILL_HERE,
    completed: bool = True,
    blocks: Any = ((5,),),
) -> None:
    request = engine.arrive(dict(params))
    engine.half.matched_tokens(request, 0)
    request.num_computed_tokens = 10
    engine.half.finished(request, blocks, completed=completed)


def test_a_prefill_that_is_kept_counts_as_offered() -> None:
    engine = Placed("prefill")
    finish(engine)
    assert served(engine) == {("offered", "", 1, 10)}


def test_an_aborted_prefill_counts_as_nothing() -> None:
    engine = Placed("prefill")
    finish(engine, completed=False)
    assert served(engine) == set()


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (SessionState(), "NO_KVD"),
        (SessionState(connected=True, kvd_generation="k-1"), "WORKERS_MISSING"),
    ],
)
def test_what_could_not_be_kept_counts_with_the_reason(state: SessionState, code: str) -> None:
    engine = Placed("prefill")
    engine.script.state = state
    finish(engine)
    assert served(engine) == {("not_offered", code, 1, 10)}


def test_a_prefill_without_blocks_and_a_push_that_is_not_done_are_named() -> None:
    engine = Placed("prefill")
    finish(engine, blocks=((),))
    finish(engine, params=PREFILL_HERE | {"transfer_mode": "push"})
    assert served(engine) == {("not_offered", "NO_BLOCKS", 1, 10), ("not_offered", "NOT_PUSHED", 1, 10)}


@pytest.mark.parametrize("groups", [LLAMA, HYBRID])
def test_a_prompt_whose_log_probabilities_are_asked_for_is_computed_whole_and_kept_for_nobody(
    groups: Sequence[GroupFacts],
) -> None:
    """Its decoder computes it all the same, and one token short vLLM has no log probability of the last."""
    engine = Placed("prefill", groups)
    request = Request("r", dict(PREFILL_HERE), num_computed_tokens=10)
    request.sampling_params = SimpleNamespace(prompt_logprobs=0)
    engine.half.new_request(request)
    assert engine.half.matched_tokens(request, 0) == (0, False)
    assert request.num_prompt_tokens == 10
    assert engine.half.finished(request, [[5]] * len(groups), completed=True) == (False, None)
    assert served(engine) == {("not_offered", "PROMPT_LOGPROBS", 1, 10)}


def test_a_request_whose_id_kvd_does_not_take_is_kept_for_nobody() -> None:
    engine = Placed("prefill", LLAMA)
    request = Request("r" * 513, dict(PREFILL_HERE), num_computed_tokens=10)
    engine.half.new_request(request)
    assert engine.half.finished(request, [[5]], completed=True) == (False, None)
    assert served(engine) == {("not_offered", "ID_TOO_LONG", 1, 10)}


@pytest.mark.parametrize("groups", [LLAMA, HYBRID])
def test_a_decoder_that_is_asked_to_prefill_answers_in_full_and_keeps_nothing(
    groups: Sequence[GroupFacts],
) -> None:
    engine = Placed("decode", groups)
    request = Request("r", dict(PREFILL_HERE), num_computed_tokens=10)
    engine.half.new_request(request)
    assert engine.half.matched_tokens(request, 0) == (0, False)
    assert (request.num_prompt_tokens, request.max_tokens) == (10, 16)
    assert engine.half.finished(request, [[5]] * len(groups), completed=True) == (False, None)
    assert served(engine) == {("plain", "ASKED_TO_PREFILL", 1, 10)}


def test_a_pushed_prefill_counts_as_pushed() -> None:
    engine = Placed("prefill", mode="push")
    finish(engine, params=PREFILL_HERE | {"transfer_mode": "push", "kvd_transfer_id": "x"})
    assert served(engine) == {("pushed", "", 1, 10)}


# --- telling kvd ---


class Slow(Script):
    """A session that sends when the test says so."""

    def deliver(self, key: str, message: Any, keep_seconds: float = 600.0, *, after: float = 0.0) -> Any:
        assert (keep_seconds, after) == (float("inf"), 2.0)
        self.kept = message
        return super().deliver(key, ReportOutcomes(engine_id="", totals=()), keep_seconds, after=after)


def test_what_is_counted_meanwhile_is_told_with_the_first() -> None:
    script = Slow()
    counts = Served("e", script.deliver)
    for _ in range(1000):
        counts.count("loaded", 7)
    assert len(script.delivered) == 1
    assert script.kept().totals == (OutcomeCount("loaded", "", 1000, 7000),)
    counts.count("loaded", 7)  # after that one was sent
    assert len(script.delivered) == 2


def test_a_report_says_what_a_kvd_has_acknowledged() -> None:
    script = Slow()
    counts = Served("e", script.deliver)
    counts.count("loaded", 7)
    assert script.kept().known == ()
    script.delivered[-1].answer(Ok())
    counts.count("missed", 5, "X")
    report = script.kept()
    assert report.known == (OutcomeCount("loaded", "", 1, 7),)
    assert report.totals == (OutcomeCount("loaded", "", 1, 7), OutcomeCount("missed", "X", 1, 5))


def test_a_report_that_the_session_did_not_take_is_tried_with_the_next_request() -> None:
    script = Slow()
    counts = Served("e", script.deliver)
    counts.count("loaded", 7)
    script.delivered[-1].fail(ClientError("full"))
    counts.count("loaded", 7)
    assert len(script.delivered) == 2


def test_codes_are_bounded() -> None:
    script = Slow()
    counts = Served("e", script.deliver)
    for n in range(10 * MOST_COUNTS):
        counts.count("missed", 1, f"C{n}")
    totals = script.kept().totals
    assert len(totals) <= MOST_COUNTS
    assert sum(n.requests for n in totals) == 10 * MOST_COUNTS


def test_a_replaced_report_changes_nothing() -> None:
    script = Slow()
    counts = Served("e", script.deliver)
    counts.count("loaded", 1)
    script.kept()
    counts.count("loaded", 1)
    script.delivered[0].fail(ClientError("a newer one took its place"))
    counts.count("loaded", 1)
    assert len(script.delivered) == 2
