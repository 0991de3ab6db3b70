"""Every backend, mode and kind of cache between two real engines: the output equals what one engine computes.

Each cell starts a pair of engines and puts all questions to it. A few cells are part of every run; all of them are
`make e2e-matrix`, which writes docs/matrix.md.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import pytest

from kvctl.demo.deployment import AskedRequest, Deployment
from tests.support.daemons import wait_for
from tests.support.deployments import HYBRID_BLOCK, counter, handed_over, prompt_of, running
from tests.support.engine_calls import engine_metrics, reset_prefix_cache
from tests.support.matrix import ALWAYS, CELLS, Cell
from tests.support.tiny_models import MODELS, ONE_AT_A_TIME

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ANSWER = 8
CHUNKS = {"llama": 256, "gemma3": 256, "qwen3.5-gdn": HYBRID_BLOCK}
"""Most tokens in a step. vLLM computes MLA on CPUs in one piece."""


@dataclass(frozen=True)
class Pair:
    """A cell's engines."""

    cell: Cell
    engines: Deployment

    def right(self, prompt: list[int]) -> tuple[int, ...]:
        """What the decoding engine computes by itself, in the pieces of a hand-over; it forgets it again.

        Two workers add up in another order than one, which in bfloat16 is another sum, and sometimes another token:
        there the prefiller has to compute it, and what is right is what a pull of the same prompt gives.
        """
        if self.cell.tp[0] != self.cell.tp[1] and MODELS[self.cell.model].dtype == "bfloat16":
            pulled = replace(self.engines, mode="pull").ask(prompt, ANSWER, timeout=300)
            assert (pulled.prefilled.error, pulled.decoded.error) == ("", "")
            answer = pulled.decoded.token_ids
        else:
            answer = self.engines.decode.submit_alone(prompt, ANSWER).result(300).token_ids[1:]
        self.forget()
        return answer

    def forget(self) -> None:
        """Empty both prefix caches; that works only when no request holds a block."""
        for engine in (self.engines.prefill, self.engines.decode):
            wait_for(partial(reset_prefix_cache, engine), 60.0)

    def bytes_of(self, asked: AskedRequest) -> int:
        """Bytes that moved for a request; every worker must have all of its part."""
        records = handed_over(self.engines, asked.handed_over, self.cell.tp[1])
        assert [(r.state, r.cause, r.mode) for r in records] == [("done", "", self.cell.mode)] * self.cell.tp[
            1
        ]
        return sum(record.bytes for record in records)


@pytest.fixture(
    scope="module",
    params=[pytest.param(c, marks=() if c in ALWAYS else pytest.mark.matrix) for c in CELLS],
    ids=str,
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    cell: Cell = request.param
    with running(
        cell.model,
        tmp_path_factory.mktemp("cell"),
        tp=cell.tp,
        mode=cell.mode,
        extra={"backend": cell.backend},
        enable_prefix_caching=cell.caching,
        max_num_seqs=1 if cell.model in ONE_AT_A_TIME else 8,
        max_num_batched_tokens=CHUNKS.get(cell.model),
    ) as engines:
        yield Pair(cell, engines)


def at_once(engines: Deployment, prompt: Sequence[int]) -> AskedRequest:
    return engines.ask(prompt, ANSWER, timeout=300)


def prefiller_first(engines: Deployment, prompt: Sequence[int]) -> AskedRequest:
    """The decoder hears of the request when the prefiller has all of it."""
    name = uuid.uuid4().hex
    there, here = engines.push_params(name)
    prefilled = engines.prefill.submit(prompt, 1, there).result(300)
    return AskedRequest(prefilled, engines.decode.submit(prompt, ANSWER, here).result(300), name)


def decoder_first(engines: Deployment, prompt: Sequence[int]) -> AskedRequest:
    """The prefiller hears of the request when the decoder's blocks are announced to it."""
    name = uuid.uuid4().hex
    there, here = engines.push_params(name)
    before = counter(engines.prefill_host, "push.announced")
    decoding = engines.decode.submit(prompt, ANSWER, here)
    wait_for(lambda: counter(engines.prefill_host, "push.announced") > before, 60.0)
    return AskedRequest(engines.prefill.submit(prompt, 1, there).result(300), decoding.result(300), name)


ORDERS: dict[str, tuple[Callable[[Deployment, Sequence[int]], AskedRequest], ...]] = {
    "pull": (at_once,),  # in its one order
    "push": (at_once, prefiller_first, decoder_first),
}


@pytest.mark.parametrize("tokens", [100, 700, 1500])
def test_prompts_of_one_chunk_and_of_many_in_any_order(pair: Pair, tokens: int) -> None:
    prompt = prompt_of(tokens, seed=1)
    expected = pair.right(prompt)
    for order in ORDERS[pair.cell.mode]:
        pair.forget()
        asked = order(pair.engines, prompt)
        assert (asked.prefilled.error, asked.decoded.error) == ("", ""), order
        assert asked.decoded.token_ids == expected, order
        assert pair.bytes_of(asked) > 0, order


def test_eight_requests_at_once(pair: Pair) -> None:
    prompts = [prompt_of(300 + 90 * number, seed=2) for number in range(8)]
    expected = [pair.right(prompt) for prompt in prompts]
    asked = asked_together(pair.engines, prompts)
    assert [one.decoded.error for one in asked] == [""] * 8
    assert [one.decoded.token_ids for one in asked] == expected
    for one in asked:
        pair.bytes_of(one)


def asked_together(engines: Deployment, prompts: Sequence[list[int]]) -> list[AskedRequest]:
    """All prompts on their way at the same time, none waited for before all are sent."""
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(lambda prompt: at_once(engines, prompt), prompts))


def test_what_the_decoder_has_is_not_moved_again_and_what_only_the_prefiller_has_is(pair: Pair) -> None:
    prompt = prompt_of(1400, seed=3)
    expected = pair.right(prompt)
    moved = []
    for forgotten in ((), (pair.engines.decode,), (pair.engines.prefill,)):
        for engine in forgotten:
            wait_for(partial(reset_prefix_cache, engine), 60.0)
        asked = at_once(pair.engines, prompt)
        assert asked.decoded.token_ids == expected
        moved.append(pair.bytes_of(asked))
    first, only_prefiller_has, only_decoder_has = moved
    assert only_prefiller_has == first
    # Of a hybrid the state moves again, and the attention that is missing.
    assert only_decoder_has < first if pair.cell.caching else only_decoder_has == first


def test_in_the_end_no_engine_holds_a_block(pair: Pair) -> None:
    asked_together(pair.engines, [prompt_of(400, seed=number) for number in (4, 5)])
    pair.forget()
    for engine in (pair.engines.prefill, pair.engines.decode):
        assert engine_metrics(engine).values["vllm:num_requests_running"] == 0
