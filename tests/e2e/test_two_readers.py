"""One prefill that several requests read: on one decoder, on two, one of which stands still, and one that is killed."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import pytest

from kvctl.demo.deployment import PREFILL_PARAMS, engine_id, engines, transfer_config
from kvctl.demo.engine import EngineProcess
from kvctl.demo.engine_spec import EngineSpec
from kvctl.processes.daemons import Kvd
from kvctl.processes.errors import EngineGone
from kvd.wire.order import AllWaiting, ForceMiss, ForcePlan
from kvd.wire.query import GetStatus, KvdStatus, ListWorkers, WorkerList
from tests.support import nursery
from tests.support.daemons import measured, wait_for
from tests.support.deployments import PATIENT, found_out, prompt_of, transfers
from tests.support.engine_calls import engine_metrics
from tests.support.engine_pids import engine_pids
from tests.support.halting import halted
from tests.support.started_kvd import start_kvd
from tests.support.tiny_models import MODELS, write_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ANSWER = 12
NAMES = ("prefill", "one", "two")


@dataclass(frozen=True)
class Trio:
    """A prefiller and two decoders, each with a kvd of its own; the second decoder's worker is a process apart."""

    hosts: tuple[Kvd, ...]
    prefill: EngineProcess
    one: EngineProcess
    two: EngineProcess

    def prefilled(self, prompt: list[int]) -> Mapping[str, Any]:
        """What the prefiller hands to a decoder."""
        params = self.prefill.submit(prompt, 1, PREFILL_PARAMS).result(120).kv_transfer_params
        assert params is not None
        self.gauge("leases.open", 1)
        return params

    def gauge(self, name: str, value: int) -> None:
        """Wait until the prefiller's kvd has this value of a gauge."""
        wait_for(lambda: cast("KvdStatus", self.hosts[0].ask(GetStatus())).gauges[name] == value, 120.0)

    def right(self, prompt: list[int]) -> tuple[int, ...]:
        """What a decoder computes by itself, in the pieces of a hand-over."""
        return self.one.submit_alone(prompt, ANSWER).result(120).token_ids[1:]

    def states(self, decoder: int, params: Mapping[str, Any], count: int = 1) -> list[str]:
        """How the loads of a prefill ended on a decoder, once so many have."""
        name = params["remote_request_id"]

        def look() -> list[str]:
            return [one.state for one in transfers(self.hosts[decoder]) if one.remote_request_id == name]

        wait_for(lambda: len(look()) >= count, 60.0)
        return look()

    def claims(self, host: int) -> int:
        """Claims on leases that a kvd has had from its local engines."""
        return cast("KvdStatus", self.hosts[host].ask(GetStatus())).counters.get("received.lease_claim", 0)

    def nothing_is_left(self, *living: EngineProcess) -> None:
        """No lease, and no block that any request holds."""
        self.gauge("leases.open", 0)
        for engine in living:
            engine.submit([5, 6, 7], 1).result(60)  # blocks are freed, and counted, in a step
            metrics = engine_metrics(engine)
            assert metrics.free_blocks == metrics.num_blocks


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    folder = tmp_path_factory.mktemp("trio")
    hosts = tuple(start_kvd(name, tmp_path_factory.mktemp(name)) for name in NAMES)
    common = EngineSpec(
        model=write_model("llama", folder / "models"),
        work_dir=folder,
        log_path=folder / "log",
        dtype=MODELS["llama"].dtype,
        max_model_len=2048,
        kv_cache_memory_bytes=16 << 20,  # few enough blocks that other prompts soon take those that are free
        enable_prefix_caching=False,
        cache_dir=found_out(folder),
    )
    roles = ("kv_producer", "kv_consumer", "kv_consumer")
    try:
        with engines(nursery.start) as start:
            made = [
                start(
                    dataclasses.replace(
                        common,
                        work_dir=folder / host.name,
                        log_path=folder / f"{host.name}.log",
                        forced_first_tokens=host.name != "prefill",
                        arguments={"distributed_executor_backend": "mp"} if host.name == "two" else {},
                        kv_transfer_config=transfer_config(host, engine_id(host), role, extra=PATIENT),
                    )
                )
                for host, role in zip(hosts, roles, strict=True)
            ]
            for engine in made:
                engine.wait_ready(300.0)
            ready = Trio(hosts, *made)
            warm = prompt_of(100, seed=1)
            for decoder in (ready.one, ready.two):
                assert decoder.submit(warm, 2, ready.prefilled(warm)).result(120).error == ""
                ready.gauge("leases.open", 0)
            yield ready
    finally:
        for host in hosts:
            host.stop()


def test_two_requests_of_one_decoder_read_one_prefill(trio: Trio) -> None:
    """As with `n: 2`: a router sends one set of params, and vLLM makes two requests of it, at once.

    Here the second may come when the first has been served, so the prefiller's kvd answers when both have claimed.
    """
    prompt = prompt_of(900, seed=2)
    right = trio.right(prompt)
    params = trio.prefilled(prompt)
    claimed = trio.claims(1)
    with halted([trio.hosts[0].process.pid]):
        answers = [trio.one.submit(prompt, ANSWER, params) for _ in range(2)]
        wait_for(lambda: trio.claims(1) == claimed + 2, 60.0)
    assert [answer.result(120).token_ids for answer in answers] == [right] * 2
    assert trio.states(1, params, 2) == ["done"] * 2
    trio.nothing_is_left(trio.prefill, trio.one)


def test_a_decoder_that_stands_still_loses_nothing_to_one_that_is_done(trio: Trio) -> None:
    prompt = prompt_of(900, seed=3)
    right = trio.right(prompt)
    params = trio.prefilled(prompt)
    workers = engine_pids(trio.two).workers
    assert len(workers) == 1
    with halted(workers):
        slow = trio.two.submit(prompt, ANSWER, params)
        trio.gauge("leases.readers", 1)
        assert trio.one.submit(prompt, ANSWER, params).result(120).token_ids == right
        trio.gauge("leases.readers", 1)
        # All that is free at the prefiller is computed over.
        for seed in range(4):
            trio.prefill.submit(prompt_of(2000, seed=40 + seed), 1).result(120)
        assert not slow.done()
    assert slow.result(120).token_ids == right
    assert (trio.states(1, params), trio.states(2, params)) == (["done"], ["done"])
    trio.nothing_is_left(trio.prefill, trio.one, trio.two)


def test_a_decoder_whose_kvd_is_away_reads_nothing_that_another_may_release(trio: Trio) -> None:
    """The prefiller's kvd cannot know of this reader, and the other decoder's release ends the lease."""
    prompt = prompt_of(900, seed=5)
    right = trio.right(prompt)
    params = trio.prefilled(prompt)
    host = trio.hosts[2]
    workers, endpoint = engine_pids(trio.two).workers, host.endpoint()
    host.process.kill()
    host.process.wait()
    with halted(workers):
        slow = trio.two.submit(prompt, ANSWER, params)
        assert trio.one.submit(prompt, ANSWER, params).result(120).token_ids == right
        trio.gauge("leases.open", 0)
        for seed in range(4):
            trio.prefill.submit(prompt_of(2000, seed=50 + seed), 1).result(120)
        assert not slow.done()
    assert slow.result(120).token_ids == right
    host.process = start_kvd(host.name, host.directory, listen=f"127.0.0.1:{endpoint.port}").process
    wait_for(
        lambda: [row.state for row in cast("WorkerList", host.ask(ListWorkers())).rows] == ["alive"] * 2, 30.0
    )
    trio.nothing_is_left(trio.prefill, trio.one, trio.two)


@pytest.mark.parametrize("released", [False, True], ids=["confirmed", "refused"])
def test_a_load_runs_beside_its_claim_and_is_used_once_that_is_confirmed(trio: Trio, released: bool) -> None:
    """The prefiller's kvd stands still while the blocks are read, which may be another prompt's by then."""
    prompt = prompt_of(300, seed=6 + released)
    right = trio.right(prompt)
    params = trio.prefilled(prompt)
    if released:
        assert trio.one.submit(prompt, ANSWER, params).result(120).token_ids == right
        trio.gauge("leases.open", 0)
        for seed in range(4):
            trio.prefill.submit(prompt_of(2000, seed=60 + seed), 1).result(120)
    order = ForceMiss(engine_id=engine_id(trio.hosts[2]), target=AllWaiting())
    with halted([trio.hosts[0].process.pid]):
        beside = trio.two.submit(prompt, ANSWER, params)
        wait_for(lambda: cast("ForcePlan", trio.hosts[2].ask(order)).requests, 60.0)
        assert [one.loading for one in cast("ForcePlan", trio.hosts[2].ask(order)).requests] == [True]
        trio.two.submit_alone(prompt_of(100, seed=8), ANSWER).result(120)  # which takes many steps
        assert not beside.done()
    assert beside.result(120).token_ids == right
    (record,) = wait_for(
        lambda: [
            one for one in transfers(trio.hosts[2]) if one.remote_request_id == params["remote_request_id"]
        ],
        60.0,
    )
    assert (record.state, record.code) == (("miss", "LEASE_ENDED") if released else ("done", ""))
    assert record.bytes
    assert record.moments["posted"] < record.moments["answered"]
    trio.nothing_is_left(trio.prefill, trio.two)


def test_a_decoder_that_is_killed_is_released_at_once(trio: Trio) -> None:
    """Last of this module: it does not come back."""
    params = trio.prefilled(prompt := prompt_of(300, seed=4))
    pids = engine_pids(trio.two)
    assert pids.core is not None
    with halted(pids.workers):
        slow = trio.two.submit(prompt, ANSWER, params)
        trio.gauge("leases.readers", 1)
        killed = time.monotonic()
        os.kill(pids.core, signal.SIGKILL)
        trio.gauge("leases.open", 0)
        measured("a killed decoder's lease is freed", time.monotonic() - killed)
    assert time.monotonic() - killed < PATIENT["lease_seconds"] / 2
    with suppress(EngineGone):
        assert slow.result(120).error
    rows = cast("WorkerList", trio.hosts[2].ask(ListWorkers())).rows
    assert "scheduler" in {row.kind for row in rows if row.state == "gone"}
    trio.nothing_is_left(trio.prefill, trio.one)
