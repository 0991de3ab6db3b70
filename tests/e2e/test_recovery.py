"""Every kind of cache, mode and backend meets every fault: right answers, and nothing left behind.

Each cell starts a pair of engines, which meet the faults one after the other; one of them is part of every run, all of
them are `make e2e-recovery`, which writes docs/recovery-matrix.md.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import pytest

from kvctl.demo.deployment import PREFILL_PARAMS, Deployment, engine_id
from kvctl.demo.engine import EngineAnswer
from kvd.wire.order import ForcedMisses, ForceMiss, ForcePlan, GetForced, NextLoads, When
from tests.support.daemons import wait_for
from tests.support.deployments import counter, leased, loading, nothing_is_left, prompt_of, running, transfers
from tests.support.engine_calls import reset_prefix_cache
from tests.support.engine_pids import engine_pids
from tests.support.halting import go_on, halt
from tests.support.matrix import Cell
from tests.support.recovery_matrix import ALWAYS, CELLS, FAULTS, name_of
from tests.support.started_kvd import start_kvd
from tests.support.tiny_models import ONE_AT_A_TIME

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ANSWER = 8
TOKENS = 400
PATIENCE = 180.0
TIMES = {"load_timeout": 5.0, "push_timeout": 8.0, "handshake_timeout": 20.0, "lease_seconds": 20.0}


@dataclass
class Stand:
    """A cell's engines; ``seed`` is of the next prompt."""

    cell: Cell
    engines: Deployment
    seed: int = 100
    caught: list[str] = field(default_factory=list)

    def prompt(self) -> list[int]:
        """One that nobody has seen."""
        self.seed += 1
        return prompt_of(TOKENS, seed=self.seed)

    def forget(self) -> None:
        """Empty the decoder's prefix cache; that works only when no request holds a block."""
        wait_for(partial(reset_prefix_cache, self.engines.decode), 60.0)

    def references(self, prompt: list[int]) -> dict[str, tuple[int, ...]]:
        """What the decoder answers by itself: to the whole prompt, and in the pieces of a hand-over."""
        whole = self.engines.decode.submit(prompt, ANSWER).result(PATIENCE).token_ids
        self.forget()
        pieces = self.engines.decode.submit_alone(prompt, ANSWER).result(PATIENCE).token_ids[1:]
        self.forget()
        return {"recompute": whole, "reuse": pieces}

    def begin(self, prompt: list[int]) -> Future[EngineAnswer]:
        """Hand a request over: the decoder's part, of pull when the prefill is done, of push when it has begun."""
        engines = self.engines
        if self.cell.mode == "push":
            there, here = engines.push_params(uuid.uuid4().hex)
            decoding = engines.decode.submit(prompt, ANSWER, here)
            engines.prefill.submit(prompt, 1, there)
            return decoding
        prefilled = engines.prefill.submit(prompt, 1, PREFILL_PARAMS).result(PATIENCE)
        return engines.decode.submit(prompt, ANSWER, prefilled.kv_transfer_params)

    def begin_without_prefiller(self, prompt: list[int]) -> Future[EngineAnswer]:
        """The same, with the prefiller stopped before it can give or write a byte; returns under way."""
        engines = self.engines
        if self.cell.mode == "push":
            there, here = engines.push_params(uuid.uuid4().hex)
            before = counter(engines.prefill_host, "push.announced")
            decoding = engines.decode.submit(prompt, ANSWER, here)
            wait_for(lambda: counter(engines.prefill_host, "push.announced") > before, 60.0)
            halt(*engine_pids(engines.prefill).executing)
            engines.prefill.submit(prompt, 1, there)
        else:
            prefilled = engines.prefill.submit(prompt, 1, PREFILL_PARAMS).result(PATIENCE)
            leased(engines)
            halt(*engine_pids(engines.prefill).executing)
            decoding = engines.decode.submit(prompt, ANSWER, prefilled.kv_transfer_params)
            wait_for(lambda: loading(self.engines) or decoding.done(), 60.0)
        assert not decoding.done(), (decoding.result(), transfers(engines.decode_host, 3))
        return decoding

    def nothing_is_left(self) -> None:
        """No request runs or waits on the decoder, and every block is free."""
        self.forget()
        nothing_is_left(self.engines)


def forced(stand: Stand, prompt: list[int], when: When) -> EngineAnswer:
    """The next load misses at that moment, and recovers."""
    host = stand.engines.decode_host
    order = ForceMiss(
        engine_id=engine_id(host), target=NextLoads(count=1, seconds=PATIENCE), when=when, carry_out=True
    )
    plan = cast("ForcePlan", host.ask(order))
    answer = stand.begin(prompt).result(PATIENCE)

    def ended() -> bool:
        found = cast("ForcedMisses", host.ask(GetForced(order_id=plan.order_id)))
        return [miss.state for miss in found.misses] == ["recovered"]

    wait_for(ended, 30.0)
    return answer


def stopped(stand: Stand, prompt: list[int]) -> EngineAnswer:
    """The prefiller stands still past the deadline. What it would have sent comes late, or never."""
    try:
        decoding = stand.begin_without_prefiller(prompt)
        answer = decoding.result(PATIENCE)
    finally:
        go_on(*engine_pids(stand.engines.prefill).executing)
    if stand.cell.caching:  # what was recomputed is cached: late bytes would have spoilt it
        again = stand.engines.decode.submit(prompt, ANSWER).result(PATIENCE)
        assert again.token_ids == answer.token_ids
    return answer


def kvd_killed(stand: Stand, prompt: list[int]) -> EngineAnswer:
    """The decoder's kvd goes and comes back."""
    host = stand.engines.decode_host
    port = host.endpoint().port
    decoding = stand.begin(prompt)
    host.process.kill()
    host.process.wait()
    answer = decoding.result(PATIENCE)
    host.process = start_kvd("decode", host.directory, listen=f"127.0.0.1:{port}").process
    return answer


def killed(stand: Stand, prompt: list[int]) -> EngineAnswer:
    """The prefiller dies and does not come back."""
    decoding = stand.begin_without_prefiller(prompt)
    for pid in engine_pids(stand.engines.prefill).executing:
        os.kill(pid, signal.SIGKILL)
    return decoding.result(PATIENCE)


DEEDS: dict[str, Callable[[Stand, list[int]], EngineAnswer]] = {
    "before": lambda stand, prompt: forced(stand, prompt, "before"),
    "flight": lambda stand, prompt: forced(stand, prompt, "flight"),
    "layers": lambda stand, prompt: forced(stand, prompt, "layers"),
    "stopped": stopped,
    "kvd": kvd_killed,
    "killed": killed,
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(c, marks=() if c in ALWAYS else pytest.mark.recovery_matrix) for c in CELLS],
    ids=name_of,
)
def stand(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    cell: Cell = request.param
    with running(
        cell.model,
        tmp_path_factory.mktemp("stand"),
        mode=cell.mode,
        extra={"backend": cell.backend, **TIMES},
        cache_dir=tmp_path_factory.getbasetemp() / "cache",
        env={"UCX_TLS": "tcp,self"},  # over TCP, where a stopped peer sends nothing
        enable_prefix_caching=cell.caching,
        max_num_seqs=1 if cell.model in ONE_AT_A_TIME else 8,
    ) as engines:
        made = Stand(cell, engines)
        handed_over(made)  # the pair knows each other
        yield made


def handed_over(stand: Stand) -> None:
    """A request without a fault, and its answer."""
    prompt = stand.prompt()
    references = stand.references(prompt)
    answer = stand.begin(prompt).result(PATIENCE)
    assert answer.error == ""
    assert answer.token_ids in references.values()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_answer_is_right_and_nothing_is_left(
    stand: Stand, fault: str, record_property: Callable[[str, object], None]
) -> None:
    prompt = stand.prompt()
    references = stand.references(prompt)
    began = time.monotonic()

    answer = DEEDS[fault](stand, prompt)

    assert answer.error == ""
    equal = [name for name, tokens in references.items() if tokens == answer.token_ids]
    assert equal, (answer.token_ids, references)
    record_property("equals", "both" if len(equal) == 2 else equal[0])
    record_property("seconds", round(time.monotonic() - began, 1))
    stand.nothing_is_left()
    if fault != "killed":
        handed_over(stand)
        stand.nothing_is_left()
