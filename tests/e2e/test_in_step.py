"""Loads that are used in the very step that orders them, between real engines: right answers, whatever becomes of them.

The decoder's scheduler and worker are one process here, as vLLM has it with one GPU. On a CPU the step waits for the
copy itself. A busy machine may answer a claim later than a step's results wait for it: such a load is a miss, and some
tests hand prompts over until one of them is what they are about. Whatever came of the others, their answers are right.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from kvctl.demo.deployment import PREFILL_PARAMS, Deployment, engine_id, engines, transfer_config
from kvctl.demo.engine import EngineAnswer
from kvd.wire.order import ForcedMisses, ForceMiss, ForcePlan, GetForced, Miss, NextLoads, When
from tests.support import nursery
from tests.support.daemons import wait_for
from tests.support.deployments import PATIENT, handed_over, leased, nothing_is_left, prompt_of, running
from tests.support.engine_calls import abort, ask_workers, reset_prefix_cache
from tests.support.engine_pids import engine_pids

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ANSWER = 8
LONG = 60
PATIENCE = 180.0
TRIES = 20
EARLY = {
    "scheduler_cls": "kvd.vllm.early.EarlyScheduler",
    "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
    "worker_extension_cls": "tests.support.used_in_step.UsedInStep",
}
BEGINS_ANEW = "which its step has used, is a miss: it begins anew"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {}),
    "windows": ("gemma3", {}),
    # With states that are kept for prefixes no load is used in its step.
    "states": ("qwen3.5-gdn", {"enable_prefix_caching": False}),
}
CACHING = [kind for kind, (_, more) in KINDS.items() if more.get("enable_prefix_caching", True)]


@dataclass(slots=True)
class Asked:
    """A prompt that was handed over as ``name``; ``lease`` is what the decoder's ledger calls it."""

    prompt: list[int]
    params: Mapping[str, Any]
    name: str
    decoding: Future[EngineAnswer]

    @property
    def lease(self) -> str:
        return str(self.params["remote_request_id"])

    @property
    def answer(self) -> EngineAnswer:
        found = self.decoding.result(PATIENCE)
        assert found.error == ""
        return found


@dataclass(slots=True)
class Stand:
    """A pair of engines; ``seed`` is of the next prompt."""

    engines: Deployment
    seed: int = 500

    def prompt(self, tokens: int) -> list[int]:
        """One that nobody has seen."""
        self.seed += 1
        return prompt_of(tokens, seed=self.seed)

    def own(self, prompt: list[int], tokens: int = ANSWER) -> EngineAnswer:
        """The decoder's own answer, with what it has in its cache."""
        return self.engines.decode.submit(prompt, tokens).result(PATIENCE)

    def pieces(self, prompt: list[int], tokens: int = ANSWER) -> tuple[int, ...]:
        """The decoder's own answer, computed in the pieces of a hand-over; it forgets it again."""
        self.forget()
        found = self.engines.decode.submit_alone(prompt, tokens).result(PATIENCE).token_ids[1:]
        self.forget()
        return found

    def whole(self, prompt: list[int], tokens: int = ANSWER) -> tuple[int, ...]:
        """The same, computed at once."""
        self.forget()
        found = self.own(prompt, tokens).token_ids
        self.forget()
        return found

    def right(self, prompt: list[int], tokens: int = ANSWER) -> set[tuple[int, ...]]:
        """The right answers, whether it is loaded or computed."""
        return {self.pieces(prompt, tokens), self.whole(prompt, tokens)}

    def right_beside(self, prompts: list[list[int]], tokens: int = ANSWER) -> list[set[tuple[int, ...]]]:
        """The same of each, with those beside the others: in bfloat16 sums of another batch round otherwise."""
        found = [self.right(prompt, tokens) for prompt in prompts]
        decode = self.engines.decode
        for ask, skipped in ((decode.submit, 0), (decode.submit_alone, 1)):
            for one, asked in zip(found, [ask(prompt, tokens) for prompt in prompts], strict=True):
                one.add(asked.result(PATIENCE).token_ids[skipped:])
            self.forget()
        return found

    def forget(self) -> None:
        """Empty the decoder's prefix cache; that works only when no request holds a block."""
        wait_for(partial(reset_prefix_cache, self.engines.decode), 60.0)

    def prefilled(self, prompt: list[int]) -> dict[str, Any]:
        """What the prefiller hands over."""
        params = self.engines.prefill.submit(prompt, 1, PREFILL_PARAMS).result(PATIENCE).kv_transfer_params
        # vLLM's, of the prefiller's cache: would hide the decoder's loads
        return {n: v for n, v in (params or {}).items() if n != "remote_prefill_cached_tokens"}

    def hand_over(self, prompt: list[int], params: Mapping[str, Any], tokens: int = ANSWER) -> Asked:
        """Have the decoder go on with it."""
        name = f"asked-{uuid.uuid4().hex}"
        return Asked(prompt, params, name, self.engines.decode.submit(prompt, tokens, params, name))

    def ask(self, prompt: list[int], tokens: int = ANSWER) -> Asked:
        """Prefill on one engine, begin to decode on the other."""
        return self.hand_over(prompt, self.prefilled(prompt), tokens)

    def together(self) -> None:
        """What the decoder is asked now it schedules in one step, where it comes within a moment."""
        self.engines.decode.call("tests.support.used_in_step:paused", 0.1)

    def in_step(self, asked: Asked) -> bool:
        """Whether its step used its load, or began to."""
        (used,) = ask_workers(self.engines.decode, "used_in_step", timeout=PATIENCE)
        return any(request_id.startswith(asked.name) for request_id in used)

    def begun_anew(self, asked: Asked) -> int:
        """How often the decoder's log says so of it."""
        lines = self.engines.decode.spec.log_path.read_text(errors="replace").splitlines()
        return sum(asked.name in line and BEGINS_ANEW in line for line in lines)

    def stood(self, asked: Asked) -> bool:
        """Whether its step used its load, and that was good."""
        state = handed_over(self.engines, asked.lease)[0].state
        return self.in_step(asked) and not self.begun_anew(asked) and state == "done"

    def force(self, when: When, count: int = 1, ratio: float = 1.0) -> str:
        """Order that of the next loads some miss at that moment; the order's id."""
        host = self.engines.decode_host
        target = NextLoads(count=count, ratio=ratio, seed=self.seed, seconds=PATIENCE)
        order = ForceMiss(engine_id=engine_id(host), target=target, when=when, carry_out=True)
        return cast("ForcePlan", host.ask(order)).order_id

    def recovered(self, order_id: str) -> tuple[Miss, ...]:
        """What became of the loads that it made miss: all were computed."""

        def look() -> tuple[Miss, ...] | None:
            found = cast("ForcedMisses", self.engines.decode_host.ask(GetForced(order_id=order_id)))
            over = not found.order.open and len(found.misses) == found.order.taken
            return found.misses if over and all(m.state == "recovered" for m in found.misses) else None

        return wait_for(look, 60.0)

    def serves_on(self) -> None:
        """Nothing is left of what was, and the next hand-over is answered right."""
        self.forget()
        nothing_is_left(self.engines)
        prompt = self.prompt(90)
        right = self.right(prompt)
        assert self.ask(prompt).answer.token_ids in right
        self.forget()
        nothing_is_left(self.engines)


@pytest.fixture(scope="module", params=KINDS)
def stand(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    model, more = KINDS[request.param]
    extra = {"backend": "direct"}
    others = {"prefill": {"arguments": {}}, "arguments": EARLY, "max_num_seqs": 8, **more}
    with running(model, tmp_path_factory.mktemp(request.param), extra=extra, **others) as deployment:
        made = Stand(deployment)
        # The first load opens the lane, between steps.
        until(lambda: made.ask(made.prompt(60)), made.stood)
        made.forget()
        yield made


def until(ask: Callable[[], Asked], is_it: Callable[[Asked], bool]) -> Asked:
    """The first that is what a test is about; the others were answered too."""
    for _ in range(TRIES):
        asked = ask()
        assert len(asked.answer.token_ids) == ANSWER
        if is_it(asked):
            return asked
    raise AssertionError(f"none of {TRIES}")


@pytest.mark.parametrize("tokens", [100, 300, 1000])
def test_the_answer_is_the_decoders_own_and_the_load_was_used_in_its_step(stand: Stand, tokens: int) -> None:
    def ask() -> Asked:
        prompt = stand.prompt(tokens)
        pieces, whole = stand.pieces(prompt), stand.whole(prompt)
        asked = stand.ask(prompt)
        assert asked.answer.token_ids in ({pieces} if stand.stood(asked) else {pieces, whole})
        return asked

    asked = until(ask, stand.stood)
    assert asked.answer.num_cached_tokens == tokens - 1, "the last one is left to the step"
    (record,) = handed_over(stand.engines, asked.lease)
    assert (record.tokens, record.backend) == (tokens - 1, "direct")
    assert record.bytes > 0
    stand.serves_on()


def test_params_that_come_twice_are_a_miss_the_second_time_and_it_begins_anew(stand: Stand) -> None:
    """The lease has ended by then: the second load begins on the params' promise, and its claim is refused."""

    def ask() -> Asked:
        prompt = stand.prompt(200)
        right = stand.right(prompt)
        first = stand.ask(prompt)
        assert first.answer.token_ids in right
        stand.forget()
        leased(stand.engines, 0)
        again = stand.hand_over(prompt, first.params)
        assert again.answer.token_ids in right
        assert again.answer.num_cached_tokens == 0
        assert stand.begun_anew(again) == int(stand.in_step(again))
        return again

    until(ask, stand.in_step)
    stand.serves_on()


@pytest.mark.parametrize("ratio", [0.0, 0.5], ids=["good", "half_of_them_miss"])
def test_several_at_once_are_right_beside_others_that_decode(stand: Stand, ratio: float) -> None:
    others = [stand.prompt(50 + 10 * number) for number in range(3)]
    prompts = [stand.prompt(80 + 60 * number) for number in range(6)]
    right = [*stand.right_beside(others, LONG), *stand.right_beside(prompts)]
    params = [stand.prefilled(prompt) for prompt in prompts]
    order = stand.force("before", len(prompts), ratio) if ratio else ""

    decoding = [stand.engines.decode.submit(prompt, LONG) for prompt in others]
    stand.together()
    asked = [stand.hand_over(*one) for one in zip(prompts, params, strict=True)]

    answers = [*(other.result(PATIENCE) for other in decoding), *(one.answer for one in asked)]
    for answer, those in zip(answers, right, strict=True):
        assert answer.token_ids in those
    if order:
        assert 0 < len(stand.recovered(order)) < len(prompts)
    stand.serves_on()


@pytest.mark.parametrize("when", ["before", "flight", "layers", "now"])
def test_a_load_that_is_forced_to_miss_is_computed(stand: Stand, when: When) -> None:
    def ask() -> Asked:
        prompt = stand.prompt(300)
        right, params = stand.right(prompt), stand.prefilled(prompt)
        order = stand.force(when)
        asked = stand.hand_over(prompt, params)
        assert asked.answer.token_ids in right
        (miss,) = stand.recovered(order)
        assert (miss.kept or 0) + (miss.recomputed or 0) == len(prompt)
        (record,) = handed_over(stand.engines, asked.lease)
        assert (record.state, record.cause) == ("miss", miss.cause)
        if stand.in_step(asked):
            assert (stand.begun_anew(asked), miss.kept, asked.answer.num_cached_tokens) == (1, 0, 0)
        return asked

    until(ask, stand.in_step)
    stand.serves_on()


@pytest.mark.parametrize("stand", CACHING, indirect=True)
@pytest.mark.parametrize("missed", [False, True], ids=["good", "missed"])
def test_who_has_the_same_prompt_while_a_load_is_unsettled_never_gets_what_did_not_come(
    stand: Stand, *, missed: bool
) -> None:
    """Nor who has it afterwards."""

    def ask() -> Asked:
        prompt = stand.prompt(400)
        right, params = stand.right(prompt), stand.prefilled(prompt)
        order = stand.force("before") if missed else ""
        stand.together()
        asked = stand.hand_over(prompt, params)
        beside = [stand.engines.decode.submit(prompt, ANSWER) for _ in range(2)]
        again = stand.hand_over(prompt, params)
        answers = [asked.answer, again.answer, *(one.result(PATIENCE) for one in beside)]
        answers.append(stand.own(prompt))
        assert {answer.token_ids for answer in answers} <= right
        assert not order or len(stand.recovered(order)) == 1
        stand.forget()
        return asked

    until(ask, stand.in_step)
    stand.serves_on()


@pytest.mark.parametrize("stand", CACHING, indirect=True)
def test_nobody_finds_what_did_not_come_for_a_request_that_was_aborted_in_its_step(stand: Stand) -> None:
    for _ in range(3):  # where the abort comes in time
        prompt = stand.prompt(400)
        right, params = stand.right(prompt), stand.prefilled(prompt)
        stand.force("before")
        ask_workers(stand.engines.decode, "slow", 0.3, timeout=PATIENCE)
        asked = stand.hand_over(prompt, params)
        time.sleep(0.1)
        abort(stand.engines.decode, asked.name)
        assert asked.answer.finish_reason in ("abort", "length")
        assert stand.own(prompt).token_ids in right
    stand.serves_on()


@pytest.mark.parametrize("stand", ["dense"], indirect=True)
def test_a_setting_turns_it_off(stand: Stand, tmp_path: Path) -> None:
    host = stand.engines.decode_host
    extra = {"backend": "direct", "in_step": "off", **PATIENT}
    config = transfer_config(host, "off", "kv_consumer", extra=extra)
    spec = dataclasses.replace(
        stand.engines.decode.spec, work_dir=tmp_path, log_path=tmp_path / "log", kv_transfer_config=config
    )
    with engines(nursery.start) as start:
        off = Stand(dataclasses.replace(stand.engines, decode=start(spec)), seed=900)
        off.engines.decode.wait_ready()
        for _ in range(3):
            prompt = off.prompt(120)
            pieces = off.pieces(prompt)
            asked = off.ask(prompt)
            assert (asked.answer.token_ids, asked.answer.num_cached_tokens) == (pieces, len(prompt))
            assert not off.in_step(asked)


def test_a_prefiller_that_is_killed_before_the_decoder_is_asked(stand: Stand) -> None:
    """The last one: this prefiller does not come back."""
    prompts = [stand.prompt(tokens) for tokens in (150, 300)]
    right = stand.right_beside(prompts)
    params = [stand.prefilled(prompt) for prompt in prompts]
    for pid in engine_pids(stand.engines.prefill).executing:
        os.kill(pid, signal.SIGKILL)
    asked = [stand.hand_over(*one) for one in zip(prompts, params, strict=True)]
    for one, answers in zip(asked, right, strict=True):
        assert one.answer.token_ids in answers
    for prompt, answers in zip(prompts, right, strict=True):
        stand.forget()
        assert stand.own(prompt).token_ids in answers
    stand.forget()
    nothing_is_left(stand.engines)
