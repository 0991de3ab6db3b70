"""One load among others: what is kept of a large one, preemption beside it, an abort, a prefix that is here already."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest

from kvctl.demo.deployment import PREFILL_PARAMS, Deployment, engine_id
from kvctl.demo.engine import EngineAnswer
from kvd.wire.order import ForcedMisses, ForceMiss, ForcePlan, GetForced, Miss, NextLoads
from kvd.wire.transfer import TransferRecord
from tests.support.daemons import wait_for
from tests.support.deployments import (
    HYBRID_BLOCK,
    handed_over,
    leased,
    loading,
    nothing_is_left,
    prompt_of,
    running,
)
from tests.support.engine_calls import abort, engine_metrics, reset_prefix_cache
from tests.support.engine_pids import engine_pids
from tests.support.halting import halted
from tests.support.tiny_models import MODELS

pytestmark = [pytest.mark.e2e, pytest.mark.recovery_matrix, pytest.mark.timeout(600)]

ANSWER = 12
TOKENS = 1000
PATIENCE = 180.0
OTHERS, OTHER_TOKENS = 12, {"llama": 124, "gemma3": 124, "qwen3.5-gdn": HYBRID_BLOCK - 4}
"""Requests that soon want a further block in each group; that many fill the cache beside the one that waits."""
CACHE_BYTES = {"llama": 8 << 20, "gemma3": 12 << 20, "qwen3.5-gdn": 8 << 20}
CHUNK = HYBRID_BLOCK
LOAD_SECONDS = 30.0
KEPT = {"llama": 512, "gemma3": 0, "qwen3.5-gdn": 0}
"""Of `TOKENS`, after a miss with half of the pieces here: four of eight blocks. Of a prompt much longer than the window
the prefiller has let go of the blocks that a shorter claim wants; a state fits one position only."""


@dataclass(frozen=True)
class Pair:
    """Two engines that read large loads block by block."""

    model: str
    engines: Deployment

    def alone(self, prompt: list[int]) -> set[tuple[int, ...]]:
        """What the decoder answers by itself: to the whole prompt, and in the pieces of a hand-over."""
        decode = self.engines.decode
        whole = decode.submit(prompt, ANSWER).result(PATIENCE)
        self.forget()
        pieces = decode.submit_alone(prompt, ANSWER).result(PATIENCE)
        self.forget()
        return {whole.token_ids, pieces.token_ids[1:]}

    def forget(self) -> None:
        """Empty the decoder's prefix cache; that works only when no request holds a block."""
        wait_for(partial(reset_prefix_cache, self.engines.decode), 60.0)

    def begin(self, prompt: list[int], name: str) -> Future[EngineAnswer]:
        """Prefill it, and give it to the decoder."""
        return self.engines.decode.submit(prompt, ANSWER, self.prefilled(prompt), name)

    def prefilled(self, prompt: list[int]) -> Mapping[str, Any]:
        """What the decoder is told of a prompt that was prefilled."""
        params = self.engines.prefill.submit(prompt, 1, PREFILL_PARAMS).result(PATIENCE).kv_transfer_params
        assert params is not None
        return params

    def record(self, params: Mapping[str, Any]) -> TransferRecord:
        """What the decoder's ledger has of it."""
        return handed_over(self.engines, params["remote_request_id"])[0]

    @contextmanager
    def waiting(self, prompt: list[int], name: str) -> Iterator[Future[EngineAnswer]]:
        """The request, waiting for its KV on the decoder while the prefiller stands still."""
        params = self.prefilled(prompt)
        leased(self.engines)
        with halted(engine_pids(self.engines.prefill).executing):
            decoding = self.engines.decode.submit(prompt, ANSWER, params, name)
            wait_for(lambda: loading(self.engines), 60.0)
            yield decoding

    def nothing_is_left(self) -> None:
        """No request runs or waits on the decoder, and every block is free."""
        self.forget()
        nothing_is_left(self.engines)


@pytest.fixture(scope="module", params=list(KEPT))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with running(
        request.param,
        tmp_path_factory.mktemp("pair"),
        extra={"piece_bytes": 1, "load_timeout": LOAD_SECONDS},
        env={"UCX_TLS": "tcp,self"},  # over TCP, where a stopped peer sends nothing
        kv_cache_memory_bytes=CACHE_BYTES[request.param],
        max_model_len=max(TOKENS, 2 * CHUNK) + 100,
        max_num_seqs=OTHERS + 1,
        max_num_batched_tokens=CHUNK if request.param == "qwen3.5-gdn" else None,
    ) as engines:
        made = Pair(request.param, engines)
        made.begin(prompt_of(100, seed=1), "first").result(PATIENCE)  # the pair knows each other
        yield made


def test_the_pieces_that_came_before_a_miss_are_kept(pair: Pair) -> None:
    prompt, kept = prompt_of(TOKENS, seed=2), KEPT[pair.model]
    expected = pair.alone(prompt)
    host = pair.engines.decode_host
    target = NextLoads(count=1, seconds=PATIENCE)
    order = ForceMiss(engine_id=engine_id(host), target=target, when="layers", carry_out=True)
    plan = cast("ForcePlan", host.ask(order))

    answer = pair.begin(prompt, "pieces").result(PATIENCE)

    assert answer.error == ""
    assert answer.token_ids in expected

    def ended() -> Miss | None:
        misses = cast("ForcedMisses", host.ask(GetForced(order_id=plan.order_id))).misses
        return next((miss for miss in misses if miss.state == "recovered"), None)

    miss = wait_for(ended, 60.0)
    assert (miss.kept, miss.recomputed) == (kept, TOKENS - kept)
    pair.nothing_is_left()


@pytest.mark.parametrize("tokens", [CHUNK, CHUNK + 1, 2 * CHUNK + 1])
def test_blocks_that_a_claim_does_not_reach_do_no_harm(pair: Pair, tokens: int) -> None:
    """Prompts that end with a block, or a token behind one: the hybrid's claim is a token shorter, its blocks not."""
    prompt = prompt_of(tokens, seed=20)
    expected = pair.alone(prompt)
    params = pair.prefilled(prompt)
    answer = pair.engines.decode.submit(prompt, ANSWER, params).result(PATIENCE)
    assert answer.error == ""
    assert answer.token_ids in expected
    assert pair.record(params).state == "done"
    pair.nothing_is_left()


def test_others_are_preempted_while_one_waits_and_all_answers_are_right(pair: Pair) -> None:
    short = OTHER_TOKENS[pair.model]
    prompt, others = prompt_of(TOKENS, seed=3), [prompt_of(short, seed=10 + n) for n in range(OTHERS)]
    expected = [pair.alone(one) for one in (prompt, *others)]
    preempted = engine_metrics(pair.engines.decode).values["vllm:num_preemptions"]

    with pair.waiting(prompt, "patient") as decoding:
        answers = [
            future.result(PATIENCE) for future in [pair.engines.decode.submit(o, ANSWER) for o in others]
        ]
        assert not decoding.done()
    answers.insert(0, decoding.result(PATIENCE))

    assert engine_metrics(pair.engines.decode).values["vllm:num_preemptions"] > preempted
    assert [answer.error for answer in answers] == [""] * len(answers)
    exact = MODELS[pair.model].dtype == "float32"  # what is computed again is computed in other pieces
    for answer, right in list(zip(answers, expected, strict=True))[: None if exact else 1]:
        assert answer.token_ids in right
    pair.nothing_is_left()


def test_an_abort_while_it_waits_leaves_nothing_and_its_late_bytes_do_no_harm(pair: Pair) -> None:
    prompt, other = prompt_of(TOKENS, seed=4), prompt_of(TOKENS, seed=5)
    expected, name = pair.alone(other), f"aborted-{uuid.uuid4().hex[:6]}"
    with pair.waiting(prompt, name) as decoding:
        abort(pair.engines.decode, name)
        assert decoding.result(PATIENCE).finish_reason == "abort"
        pair.nothing_is_left()  # once none of its bytes can land any more: the prefiller still stands still
        answer = pair.engines.decode.submit(other, ANSWER).result(PATIENCE).token_ids
        assert answer in expected
    pair.prefilled(prompt_of(100, seed=6))  # it is at work again
    again = pair.engines.decode.submit(other, ANSWER).result(PATIENCE)
    assert (again.token_ids, (again.num_cached_tokens or 0) > 0) == (answer, True)
    pair.nothing_is_left()


def test_what_is_here_already_is_not_loaded_and_the_rest_is(pair: Pair) -> None:
    shared = prompt_of(TOKENS // CHUNK * CHUNK, seed=7)
    prompt, other = ([*shared, *prompt_of(TOKENS - len(shared), seed=seed)] for seed in (8, 9))
    expected = pair.alone(prompt)
    params = pair.prefilled(prompt)
    whole = pair.engines.decode.submit(prompt, ANSWER, params).result(PATIENCE)
    assert whole.token_ids in expected
    pair.forget()
    pair.engines.decode.submit(other, ANSWER).result(PATIENCE)  # computed here, and cached

    again = pair.prefilled(prompt)
    answer = pair.engines.decode.submit(prompt, ANSWER, again).result(PATIENCE)

    assert answer.error == ""
    assert answer.token_ids in expected
    first, second = pair.record(params), pair.record(again)
    assert (second.state, second.cause) == ("done", "")
    # With windows vLLM 0.32 finds no hit here: the blocks of the other prompt's window lie further on.
    assert (0 < second.bytes < first.bytes) == (pair.model != "gemma3")
    pair.nothing_is_left()
