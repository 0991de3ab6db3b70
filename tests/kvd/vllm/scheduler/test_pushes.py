"""The prefiller's scheduler in push mode: what each step orders, and whose blocks are kept until when."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvd.vllm.memory.groups import GroupFacts
from kvd.vllm.scheduler.half import SchedulerHalf
from kvd.wire.lease import LeaseOpened
from kvd.wire.push import PushKept
from kvd.worker.cause import text_of
from kvd.worker.orders import PushEnd, PushStep
from kvd.worker.settings import ConnectorSettings
from tests.support.rigs.bench import Script, facts, prompt
from tests.support.rigs.half import HYBRID, LLAMA, PREFILL_HERE, Request

Table = tuple[list[int], ...]


@dataclass
class BlockState:
    """The block tables of the requests of a step."""

    tables: dict[str, Table]

    def get_block_ids(self, req_id: str) -> Table | None:
        return self.tables.get(req_id)


@dataclass
class Output:
    """vLLM's SchedulerOutput, as far as it is looked at."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: AbstractSet[str] | None = None
    kv_connector_block_state: BlockState | None = None


class Prefiller:
    """One engine's scheduler half, stepped as vLLM does: computed tokens are counted after orders are made."""

    def __init__(self, groups: Sequence[GroupFacts] = LLAMA, mode: str = "push", **settings: Any) -> None:
        self.script = Script()
        self.half = SchedulerHalf(
            ConnectorSettings(mode=mode, **settings),  # type: ignore[arg-type]
            facts("p", len(groups)),
            groups,
            "recompute",
            self.script.open,
        )
        self.requests: dict[str, Request] = {}

    def arrive(self, request_id: str = "r", name: object = "x", **more: Any) -> Request:
        params = {**PREFILL_HERE, "transfer_mode": "push", "kvd_transfer_id": name, **more}
        request = self.requests[request_id] = Request(request_id, params)
        self.half.new_request(request)
        return request

    def kept(self) -> list[tuple[str, str, str]]:
        """What the workers are told of ahead of a step: engine, transfer and request."""
        said = [asked.message for asked in self.script.asked(PushKept)]
        return [(one.engine_id, one.transfer_id, one.request_id) for one in said]

    def step(
        self, tokens: int, *table: list[int], request_id: str = "r", preempted: AbstractSet[str] = frozenset()
    ) -> tuple[list[PushStep], list[PushEnd]]:
        scheduled = {request_id: tokens} if tokens else {}
        output = Output(scheduled, preempted, BlockState({request_id: table}))
        for other in preempted:
            self.requests[other].num_computed_tokens = 0
        orders = self.half.step_orders(output)
        if tokens:
            self.requests[request_id].num_computed_tokens += tokens
        return [replace(step, digest="") for step in orders.pushes], orders.push_ends

    def holds(self) -> bool:
        return self.half.holds_pushed

    def finish(self, *table: list[int], request_id: str = "r", completed: bool = True) -> bool:
        kept, params = self.half.finished(self.requests[request_id], table, completed=completed)
        assert params is None
        return kept


def test_of_states_it_is_said_ahead_of_the_step_where_they_stand() -> None:
    p = Prefiller(HYBRID)
    p.arrive()
    p.step(9, [3, 4], [5, 6])
    assert p.finish([3, 4], [5, 6])
    (asked,) = p.script.asked(PushKept)
    ((step,), _) = p.step(0)
    assert [(run.group, (run.first, run.ids)) for run in asked.message.blocks] == [(0, step.groups[0])]


def test_nothing_is_said_ahead_of_what_ended_early_or_lost_blocks() -> None:
    aborted, window = Prefiller(), Prefiller((GroupFacts("sliding_window", 2, 4),))
    aborted.arrive()
    aborted.step(4, [5])
    assert not aborted.finish([5], completed=False)
    window.arrive()
    window.step(10, [0, 0, 0, 7, 8])
    assert window.finish([0, 0, 0, 0, 8])
    assert aborted.kept() == window.kept() == []


def test_each_step_says_how_far_the_prompt_will_be_computed() -> None:
    p = Prefiller()
    p.arrive()
    assert p.step(4, [5]) == ([PushStep("x", "r", {0: (0, (5,))}, 4, 10)], [])
    assert p.step(6, [5, 6, 7]) == ([PushStep("x", "r", {0: (0, (5, 6, 7))}, 10, 10, held=4)], [])


def test_every_step_carries_the_digest_of_the_whole_prompt() -> None:
    p = Prefiller()
    p.arrive()
    key = p.script.card().digest_key
    whole = prompt(range(10)).digest(key, 10)
    scheduled = Output({"r": 4}, None, BlockState({"r": ([5],)}))
    preempted = Output({}, frozenset({"r"}), BlockState({}))
    steps = [p.half.step_orders(output).pushes[0] for output in (scheduled, preempted, scheduled)]
    assert [step.digest for step in steps] == [whole] * 3


def test_of_a_state_the_digest_is_of_one_token_less_too() -> None:
    p = Prefiller(HYBRID)
    p.arrive()
    (step,) = p.half.step_orders(Output({"r": 9}, None, BlockState({"r": ([4], [5, 6])}))).pushes
    assert step.digest == prompt(range(9)).digest(p.script.card().digest_key, 9)


def test_a_cached_prefix_is_held_before_the_first_step() -> None:
    p = Prefiller()
    p.arrive().num_computed_tokens = 8
    assert p.step(2, [5, 6, 7])[0] == [PushStep("x", "r", {0: (0, (5, 6, 7))}, 10, 10, held=8)]


def test_what_another_connector_loads_in_the_step_is_not_held_before_it() -> None:
    p = Prefiller()
    request = p.arrive()
    assert p.half.matched_tokens(request, 4) == (0, False)
    request.num_computed_tokens = 8  # as vLLM counts it when the orders are made
    assert p.step(1, [5, 6, 7])[0] == [PushStep("x", "r", {0: (0, (5, 6, 7))}, 9, 10, held=4)]
    assert p.step(1, [5, 6, 7])[0] == [PushStep("x", "r", {0: (0, (5, 6, 7))}, 10, 10, held=9)]


def test_nor_when_the_request_was_preempted_and_comes_back() -> None:
    p = Prefiller()
    request = p.arrive()
    p.step(4, [5])
    p.step(0, preempted={"r"})
    assert p.half.matched_tokens(request, 0) == (0, False)
    request.num_computed_tokens = 8
    assert p.step(2, [5, 6, 7])[0] == [PushStep("x", "r", {0: (0, (5, 6, 7))}, 10, 10)]


def test_a_step_without_the_request_says_nothing_of_it() -> None:
    p = Prefiller()
    p.arrive()
    p.step(4, [5])
    assert p.step(0) == ([], [])
    p.requests["other"] = Request("other")
    assert p.step(3, [1], request_id="other") == ([], [])


def test_tokens_that_the_prefiller_generates_are_not_pushed() -> None:
    p = Prefiller()
    p.arrive()
    p.step(10, [5, 6, 7])
    assert p.step(1, [5, 6, 7]) == ([], [])


def test_blocks_are_kept_until_all_workers_have_sent_them_and_are_freed_once() -> None:
    p = Prefiller(lease_seconds=12.0)
    p.arrive()
    p.step(10, [5, 6, 7])
    assert not p.holds()
    assert p.finish([5, 6, 7])
    assert p.holds()
    assert p.kept() == [("p", "x", "r")], "workers need not wait for the next step"
    assert p.step(0) == ([], [PushEnd("x", "r", 12.0)])
    assert p.step(0) == ([], [])
    assert not p.script.told(LeaseOpened), "what is pushed needs no lease"
    p.half.sent({"r", "someone else"})
    assert not p.half.step_orders().push_ends


def test_an_aborted_request_keeps_nothing_and_says_why() -> None:
    p = Prefiller()
    p.arrive()
    p.step(4, [5])
    assert not p.finish([5], completed=False)
    assert not p.holds()
    ((steps), (end,)) = p.step(0)
    assert (steps, end.transfer_id, end.request_id) == ([], "x", "r")
    assert "aborted" in text_of(end.cause)


def test_a_request_that_was_never_scheduled_says_that_it_is_over() -> None:
    p = Prefiller()
    p.arrive()
    assert not p.finish([], completed=False)
    assert [text_of(end.cause) for end in p.step(0)[1]] == ["the prefiller's request was aborted"]


def test_a_prompt_that_was_not_computed_whole_is_not_offered() -> None:
    p = Prefiller()
    p.arrive()
    p.step(4, [5])
    assert not p.finish([5])
    assert [text_of(end.cause) for end in p.step(0)[1]] == ["only 4 of its 10 tokens were computed"]


def test_a_preemption_is_told_in_the_step_that_overwrites_the_blocks() -> None:
    p = Prefiller()
    p.arrive()
    p.step(8, [5, 6])
    assert p.step(0, preempted={"r"})[0] == [PushStep("x", "r", {}, 0, 10, again=True)]
    assert p.step(0)[0] == []
    assert p.step(10, [1, 2, 3])[0] == [PushStep("x", "r", {0: (0, (1, 2, 3))}, 10, 10)]


def test_a_request_that_is_preempted_and_resumed_in_one_step_starts_again() -> None:
    p = Prefiller()
    p.arrive()
    p.step(10, [5, 6, 7])
    assert p.step(4, [8], preempted={"r"})[0] == [PushStep("x", "r", {0: (0, (8,))}, 4, 10, again=True)]


def test_a_state_is_named_when_the_request_has_ended_and_one_token_short() -> None:
    p = Prefiller(HYBRID)
    request = p.arrive()
    assert request.num_prompt_tokens == 9
    assert p.step(9, [4], [5, 6])[0] == [PushStep("x", "r", {1: (0, (5, 6))}, 9, 9)]
    assert p.finish([4], [5, 6])
    assert p.step(0) == (
        [PushStep("x", "r", {0: (0, (4,)), 1: (0, (5, 6))}, 9, 9, held=9)],
        [PushEnd("x", "r", 30.0)],
    )


def test_a_block_of_the_window_that_vllm_let_go_of_is_not_read_any_more() -> None:
    p = Prefiller((GroupFacts("sliding_window", 2, 4),))
    p.arrive()
    p.step(10, [0, 0, 0, 7, 8])
    assert p.finish([0, 0, 0, 0, 8])
    ((step,), _) = p.step(0)
    assert step.again
    assert step.groups == {0: (4, (8,))}


def test_blocks_that_left_the_window_for_good_change_nothing() -> None:
    p = Prefiller((GroupFacts("sliding_window", 2, 4),))
    p.arrive()
    p.step(10, [0, 6, 0, 7, 8])
    assert p.finish([0, 0, 0, 7, 8])
    assert p.step(0)[0] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [(7, "kvd_transfer_id is 7"), ("", "kvd_transfer_id is ''"), (None, "kvd_transfer_id is None")],
)
def test_a_transfer_without_a_name_is_not_pushed_and_keeps_nothing(
    name: object, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    p = Prefiller()
    p.arrive(name=name)
    assert words in caplog.text
    assert p.step(10, [5, 6, 7]) == ([], [])
    assert not p.finish([5, 6, 7])


def test_a_long_name_is_not_written_out(caplog: pytest.LogCaptureFixture) -> None:
    """It is a client's, and of any length."""
    p = Prefiller()
    for name in ("x" * 100_000, {"a": "x" * 100_000}, 10**5000):
        p.arrive(name=name)
    assert len(caplog.text) < 2000


def test_an_engine_that_does_not_push_says_so(caplog: pytest.LogCaptureFixture) -> None:
    p = Prefiller(mode="pull")
    p.arrive()
    assert "this engine's mode is pull" in caplog.text
    assert not p.finish([5, 6, 7])
    assert not p.script.told(LeaseOpened)


def test_a_second_request_of_the_same_name_is_not_pushed_while_the_first_is_held() -> None:
    p = Prefiller()
    p.arrive()
    p.arrive("s")
    p.step(10, [5, 6, 7])
    assert p.finish([5, 6, 7])
    p.arrive("t")
    assert p.step(10, [1, 2, 3], request_id="s")[0] == []
    p.half.sent({"r"})
    p.arrive("u")
    assert [s.request_id for s in p.step(10, [1, 2, 3], request_id="u")[0]] == ["u"]


def test_a_request_without_a_transfer_is_pulled_as_ever() -> None:
    p = Prefiller()
    request = Request("r", dict(PREFILL_HERE), num_computed_tokens=10)
    p.half.new_request(request)
    kept, params = p.half.finished(request, ([5, 6, 7],), completed=True)
    assert kept
    assert params is not None
    assert p.script.told(LeaseOpened)
    assert not p.holds()
