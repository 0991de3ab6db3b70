"""What may go wrong with a push between real engines: answers stay right, blocks come back, nobody waits.

One pair of engines for all of it; the tests that kill an engine start another one in its place.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from kvctl.demo.deployment import Deployment, Start, engine_id, engines, transfer_config
from kvctl.demo.engine import EngineAnswer, EngineProcess
from kvctl.demo.engine_spec import EngineSpec
from kvctl.processes.daemons import Kvd, two_hosts
from kvctl.processes.errors import EngineGone
from kvd.client.operator import connect
from kvd.wire.query import GetStatus, KvdStatus
from kvd.wire.transfer import TransferRecord
from tests.support import faulty_prefiller, nursery
from tests.support.daemons import measured, wait_for
from tests.support.deployments import HYBRID_BLOCK, found_out, handed_over, prompt_of
from tests.support.engine_calls import abort, engine_metrics, reset_prefix_cache
from tests.support.engine_pids import engine_pids
from tests.support.halting import go_on, stands_still
from tests.support.matrix import FAULTY, Cell
from tests.support.started_kvd import start_kvd
from tests.support.tiny_models import MODELS, write_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ANSWER = 8
LONG = 2000
"""Tokens of a prompt that is computed in several chunks, so that something can be done in the middle of it."""
CHUNKS = {"llama": 64, "qwen3.5-gdn": HYBRID_BLOCK}
PUSH_SECONDS, LEASE_SECONDS = 15.0, 25.0
SETTINGS = {
    "mode": "push",
    "push_timeout": PUSH_SECONDS,
    "lease_seconds": LEASE_SECONDS,
    "load_timeout": PUSH_SECONDS,
    "handshake_timeout": 60.0,
}


@dataclass
class Going:
    """A request that both engines have."""

    name: str
    decoding: Future[EngineAnswer]
    prefilling: Future[EngineAnswer]


@dataclass
class Pair:
    """Two engines, either of which may be started anew; files in ``faults`` make the prefiller go wrong."""

    model: str
    backend: str
    hosts: tuple[Kvd, Kvd]
    start: Start
    faults: Path
    specs: tuple[EngineSpec, EngineSpec]
    engines: Deployment = field(init=False)

    def __post_init__(self) -> None:
        prefill, decode = (self.start(spec) for spec in self.specs)
        self.engines = Deployment(*self.hosts, prefill, decode, "push")
        for engine in (self.prefill, self.decode):
            engine.wait_ready(300)

    @property
    def prefill(self) -> EngineProcess:
        return self.engines.prefill

    @property
    def decode(self) -> EngineProcess:
        return self.engines.decode

    # --- what is right ---

    def right(self, prompt: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The answer after a hand-over (``done``) and where the decoder computes everything (``miss``)."""
        done = self.decode.submit_alone(prompt, ANSWER).result(300).token_ids[1:]
        self.forget(self.decode)
        miss = self.decode.submit(prompt, ANSWER).result(300).token_ids
        self.forget(self.decode)
        return {"done": done, "miss": miss}

    def record(self, name: str) -> TransferRecord:
        """What became of a transfer."""
        return handed_over(self.engines, name)[0]

    def forget(self, *which: EngineProcess, seconds: float = 60.0) -> None:
        """Empty prefix caches. That is refused as long as any request holds a block, also one that is over."""
        for engine in which or (self.prefill, self.decode):
            wait_for(partial(reset_prefix_cache, engine), seconds)

    def well(self) -> None:
        """Blocks are back, nobody waits, and the next request is handed over."""
        self.forget()
        prompt = prompt_of(300, seed=uuid.uuid4().int)
        right = self.right(prompt)
        asked = self.engines.ask(prompt, ANSWER)
        assert (asked.prefilled.error, asked.decoded.error) == ("", "")
        record = self.record(asked.handed_over)
        assert (record.state, record.cause) == ("done", "")
        assert asked.decoded.token_ids == right["done"]
        self.forget()
        for engine in (self.prefill, self.decode):
            values = engine_metrics(engine).values
            assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0

    # --- requests ---

    def announce(self, prompt: Sequence[int]) -> tuple[str, Future[EngineAnswer], dict[str, object]]:
        """A request that the decoder has announced and the prefiller has not; with the params for the latter."""
        name = uuid.uuid4().hex
        there, here = self.engines.push_params(name)
        with connect(self.engines.prefill_host.address, 60.0) as operator:

            def announced() -> int:
                return cast("KvdStatus", operator.ask(GetStatus())).counters.get("push.announced", 0)

            before = announced()
            decoding = self.decode.submit(prompt, ANSWER, here, request_id=f"d-{name}")
            wait_for(lambda: announced() > before, 60.0)
        return name, decoding, there

    @contextmanager
    def mid_prefill(self, prompt: Sequence[int]) -> Iterator[Going]:
        """The prefiller stands still in the middle of a request, some of which has left; it goes on afterwards."""
        name, decoding, there = self.announce(prompt)
        (self.faults / "stop").touch()
        prefilling = self.prefill.submit(prompt, 1, there, request_id=f"p-{name}")
        with standing(self.prefill):
            yield Going(name, decoding, prefilling)

    @staticmethod
    def held(engine: EngineProcess) -> int:
        """Blocks that requests held at the last step."""
        metrics = engine_metrics(engine)
        return metrics.num_blocks - metrics.free_blocks

    def answered(self, going: Going, right: dict[str, tuple[int, ...]]) -> TransferRecord:
        """Both sides have answered, rightly; what became of the transfer."""
        assert going.prefilling.result(300).error == ""
        return self.decoded(going, right)

    def decoded(self, going: Going, right: dict[str, tuple[int, ...]]) -> TransferRecord:
        """The decoder has answered, rightly; what became of the transfer."""
        answer = going.decoding.result(300)
        assert answer.error == ""
        record = self.record(going.name)
        assert answer.token_ids == right[record.state], record.cause
        return record


@contextmanager
def standing(engine: EngineProcess) -> Iterator[None]:
    """The processes that compute have stopped; they go on afterwards."""
    pids = engine_pids(engine).executing
    try:
        wait_for(lambda: all(stands_still(pid) for pid in pids), 60.0)
        yield
    finally:
        go_on(*pids)


def killed(engine: EngineProcess) -> None:
    """SIGKILL to the processes that compute, and the end of the rest."""
    for pid in engine_pids(engine).executing:
        os.kill(pid, signal.SIGKILL)
    engine.stop(1.0)


ALWAYS = Cell("llama", True, "nixl", "push")


@pytest.fixture(
    scope="module",
    params=[pytest.param(cell, marks=() if cell == ALWAYS else pytest.mark.matrix) for cell in FAULTY],
    ids=lambda cell: f"{cell.model}-{cell.backend}",
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    cell: Cell = request.param
    model, backend = cell.model, cell.backend
    folder = tmp_path_factory.mktemp("faults")
    faults = folder / "faults"
    faults.mkdir()
    path = write_model(model, folder / "models")
    with two_hosts(folder) as hosts, engines(nursery.start) as start:
        specs = [
            EngineSpec(
                model=path,
                dtype=MODELS[model].dtype,
                max_model_len=LONG + 64,
                max_num_batched_tokens=CHUNKS[model],
                cache_dir=found_out(folder),
                work_dir=folder / host.name,
                log_path=folder / f"{host.name}.log",
                forced_first_tokens=role == "kv_consumer",
                env=faulty_prefiller.environment(faults),
                kv_transfer_config={
                    **transfer_config(host, engine_id(host), role, extra={"backend": backend, **SETTINGS}),
                    "kv_connector_module_path": faulty_prefiller.__name__,
                },
            )
            for host, role in zip(hosts, ("kv_producer", "kv_consumer"), strict=True)
        ]
        yield Pair(model, backend, hosts, start, faults, (specs[0], specs[1]))


@pytest.fixture
def refused(pair: Pair, request: pytest.FixtureRequest) -> Iterator[str]:
    """As long as a test runs the prefiller's writes fail in one way."""
    if pair.backend == "direct":
        pytest.skip("backend direct writes nothing that could fail: its decoder reads each layer")
    how: str = request.param
    (pair.faults / how).touch()
    yield how
    (pair.faults / how).unlink()


@pytest.mark.parametrize("refused", ["refuse", "fail"], indirect=True)
def test_a_layer_that_cannot_be_written_is_a_miss(pair: Pair, refused: str) -> None:
    prompt = prompt_of(400, seed=1)
    right = pair.right(prompt)
    began = time.monotonic()
    asked = pair.engines.ask(prompt, ANSWER)
    measured(f"a request whose writes {refused}", time.monotonic() - began)
    assert (asked.prefilled.error, asked.decoded.error) == ("", "")
    record = pair.record(asked.handed_over)
    assert record.state == "miss"
    assert faulty_prefiller.REASON in record.cause
    assert asked.decoded.token_ids == right["miss"]
    (pair.faults / refused).rename(pair.faults / "over")
    pair.well()
    (pair.faults / "over").rename(pair.faults / refused)


@pytest.mark.matrix
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_kvd_killed_and_restarted_in_the_middle(pair: Pair, side: str) -> None:
    prompt = prompt_of(LONG, seed=2)
    right = pair.right(prompt)
    host: Kvd = getattr(pair.engines, f"{side}_host")
    port = host.endpoint().port
    with pair.mid_prefill(prompt) as going:
        host.process.kill()
        host.process.wait()
        host.process = start_kvd(side, host.directory, listen=f"127.0.0.1:{port}").process
    record = pair.answered(going, right)
    # What was said to it is said again to the next one; only a machine that is too slow for that loses the transfer.
    assert record.state == "done" or "not complete within" in record.cause, record.cause
    pair.well()


def test_a_decoder_that_is_asked_late_and_one_that_is_asked_twice(pair: Pair) -> None:
    prompt = prompt_of(500, seed=3)
    right = pair.right(prompt)
    name = uuid.uuid4().hex
    there, here = pair.engines.push_params(name)
    prefilling = pair.prefill.submit(prompt, 1, there)
    assert prefilling.result(120).error == ""
    late = pair.decode.submit(prompt, ANSWER, here)
    assert late.result(120).token_ids == right["done"]
    assert pair.record(name).state == "done"
    pair.forget()

    # Blocks went with the first; nothing says so to a router that sends it again.
    again = pair.decode.submit(prompt, ANSWER, here)
    assert again.result(120).token_ids == right["miss"]
    pair.forget()

    name = uuid.uuid4().hex
    there, here = pair.engines.push_params(name)
    both = [pair.decode.submit(prompt, ANSWER, here) for _ in range(2)]
    pair.prefill.submit(prompt, 1, there).result(120)
    assert {one.result(120).token_ids for one in both} <= set(right.values())
    pair.well()


def test_what_the_other_side_never_hears_of_ends_by_itself(pair: Pair) -> None:
    """One request at the prefiller alone, one at the decoder alone."""
    prompt = prompt_of(450, seed=4)
    right = pair.right(prompt)
    there, _ = pair.engines.push_params(uuid.uuid4().hex)
    assert pair.prefill.submit(prompt, 1, there).result(120).error == ""
    prefilled = time.monotonic()
    assert pair.held(pair.prefill) > 0, "the prefiller keeps what a decoder may yet announce"
    name, decoding, _ = pair.announce(prompt)
    assert pair.decoded(Going(name, decoding, decoding), right).state == "miss"
    pair.forget(seconds=LEASE_SECONDS + 60)
    measured("blocks that no decoder asked for were kept", time.monotonic() - prefilled)
    pair.well()


@pytest.mark.matrix
def test_an_abort_at_the_decoder_frees_the_prefiller(pair: Pair) -> None:
    prompt = prompt_of(LONG, seed=5)
    with pair.mid_prefill(prompt) as going:
        abort(pair.decode, f"d-{going.name}")
        assert going.decoding.result(60).finish_reason == "abort"
    assert going.prefilling.result(120).error == ""
    pair.forget(seconds=LEASE_SECONDS - 5)  # without waiting for a lease to run out
    pair.well()


@pytest.mark.matrix
def test_what_shares_the_window_of_a_request_that_was_given_up_arrives_all_the_same(pair: Pair) -> None:
    """A prefiller that stands still cannot say that it writes no more, so the decoder closes what it writes into."""
    if pair.backend == "direct":
        pytest.skip("backend direct has no window to share: its decoder reads each layer")
    prompt, other = prompt_of(LONG, seed=11), prompt_of(600, seed=12)
    right = pair.right(other)
    name, decoding, there = pair.announce(other)
    with pair.mid_prefill(prompt) as going:
        prefilling = pair.prefill.submit(other, 1, there)
        before = pair.held(pair.decode)
        abort(pair.decode, f"d-{going.name}")
        wait_for(lambda: pair.held(pair.decode) < before, 30.0)  # reported: nothing can land any more
    record = pair.answered(Going(name, decoding, prefilling), right)
    if record.state == "done":
        assert record.attempts == 2
    else:
        # Too late, or so late that the prompt was prefilled, and its blocks freed, before the new window was announced.
        assert any(words in record.cause for words in ("not complete within", "no longer kept"))
    pair.well()


@pytest.mark.matrix
def test_an_abort_at_the_prefiller_is_a_miss_at_once(pair: Pair) -> None:
    prompt = prompt_of(LONG, seed=6)
    right = pair.right(prompt)
    with pair.mid_prefill(prompt) as going:
        abort(pair.prefill, f"p-{going.name}")
    assert going.prefilling.result(60).finish_reason == "abort"
    record = pair.decoded(going, right)
    assert (record.state, "aborted" in record.cause) == ("miss", True), record.cause
    pair.well()


@pytest.mark.matrix
def test_a_prefiller_that_stands_still_past_the_deadline_and_goes_on(pair: Pair) -> None:
    prompt = prompt_of(LONG, seed=7)
    right = pair.right(prompt)
    with pair.mid_prefill(prompt) as going:
        record = pair.decoded(going, right)
        assert (record.state, "not complete within" in record.cause) == ("miss", True), record.cause
        again = pair.decode.submit(prompt, ANSWER).result(120).token_ids
    assert going.prefilling.result(120).error == ""
    # What was computed instead is cached; bytes that came late would have spoilt it.
    assert pair.decode.submit(prompt, ANSWER).result(120).token_ids == again == right["miss"]
    pair.well()


@pytest.mark.matrix
def test_a_decoder_killed_after_its_announcement(pair: Pair) -> None:
    prompt, own = prompt_of(LONG, seed=8), prompt_of(350, seed=9)
    alone = pair.prefill.submit(own, ANSWER).result(120).token_ids
    with pair.mid_prefill(prompt) as going:
        others = pair.prefill.submit(own, ANSWER)
        killed(pair.decode)
        with pytest.raises(EngineGone):
            going.decoding.result(30)
    assert others.result(120).token_ids == alone
    assert going.prefilling.result(120).error == ""
    pair.forget(pair.prefill, seconds=LEASE_SECONDS - 5)
    pair.engines.decode = pair.start(pair.specs[1])
    pair.decode.wait_ready(300)
    pair.well()


@pytest.mark.matrix
def test_a_prefiller_killed_in_mid_prefill(pair: Pair) -> None:
    prompt = prompt_of(LONG, seed=10)
    right = pair.right(prompt)
    with pair.mid_prefill(prompt) as going:
        killed(pair.prefill)
        record = pair.decoded(going, right)
    assert record.state == "miss"
    pair.forget(pair.decode)
    pair.engines.prefill = pair.start(pair.specs[0])
    pair.prefill.wait_ready(300)
    pair.well()
