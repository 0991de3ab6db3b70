"""What real engines survive: their kvd killed, a prefiller stopped in the middle of a load, a worker killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import cast

import pytest

from kvctl.demo.deployment import PREFILL_PARAMS, Deployment
from kvctl.processes.daemons import Kvd
from kvd.wire.query import EngineList, EngineRow, GetStatus, KvdStatus, ListEngines, ListWorkers, WorkerList
from kvd.wire.transfer import LedgerRow, ListTransfers, TransferList
from tests.support.daemons import measured, wait_for
from tests.support.deployments import prompt_of, running, transfers_of
from tests.support.engine_pids import engine_pids
from tests.support.forgetting import forget_prefixes
from tests.support.halting import halted
from tests.support.started_kvd import start_kvd

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ANSWER = 12
LOAD_SECONDS = 5.0


@pytest.fixture(scope="module", params=[pytest.param("llama", marks=pytest.mark.matrix), "qwen3.5-gdn"])
def over_tcp(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """One group of KV cache, and several; over TCP, where a stopped peer sends nothing."""
    folder = tmp_path_factory.mktemp("tcp")
    with running(
        request.param, folder, extra={"load_timeout": LOAD_SECONDS}, env={"UCX_TLS": "tcp,self"}
    ) as deployment:
        yield deployment


def transfers(deployment: Deployment, limit: int = 50) -> tuple[LedgerRow, ...]:
    return cast("TransferList", deployment.decode_host.ask(ListTransfers(limit=limit))).rows


def engine_of(host: Kvd, name: str) -> EngineRow:
    rows = cast("EngineList", host.ask(ListEngines())).rows
    return next(row for row in rows if row.engine.engine_id == name)


def test_a_load_from_a_stopped_prefiller_misses_and_the_answer_is_right(over_tcp: Deployment) -> None:
    prompt = prompt_of(300, seed=1)
    right = over_tcp.decode.submit_alone(prompt, ANSWER).result(120).token_ids[1:]
    forget_prefixes(over_tcp.decode)
    over_tcp.ask(prompt_of(200, seed=2), ANSWER)  # the pair knows each other
    prefilled = over_tcp.prefill.submit(prompt, 1, PREFILL_PARAMS).result(120)
    with halted(engine_pids(over_tcp.prefill).executing):
        decoded = over_tcp.decode.submit(prompt, ANSWER, prefilled.kv_transfer_params).result(120)

    assert decoded.error == ""
    assert decoded.token_ids == _alone(over_tcp, prompt)
    assert right[0] == decoded.token_ids[0]
    newest = transfers_of(over_tcp, prefilled)[0]
    assert newest.state == "miss"
    assert "not complete within" in newest.cause

    # What was recomputed is cached now: late bytes would have spoilt it.
    again = over_tcp.decode.submit(prompt, ANSWER).result(120)
    assert again.token_ids == decoded.token_ids
    # A machine that stands still for `LOAD_SECONDS` makes a miss of any load: not of three in a row.
    after = [_loaded(over_tcp, prompt_of(250, seed=30 + n)) for n in range(3)]
    assert ("done", "") in after
    assert all("not complete within" in cause for state, cause in after if state != "done")


def _loaded(deployment: Deployment, prompt: list[int]) -> tuple[str, str]:
    """What the ledger says of a hand-over of ``prompt`` that was answered: state and cause."""
    asked = deployment.ask(prompt, ANSWER)
    assert asked.decoded.error == ""
    record = transfers_of(deployment, asked.prefilled)[0]
    return record.state, record.cause


def _alone(deployment: Deployment, prompt: list[int]) -> tuple[int, ...]:
    """What the decoder computes for the whole prompt by itself, as it does after a miss."""
    forget_prefixes(deployment.decode)
    return deployment.decode.submit(prompt, ANSWER).result(120).token_ids


def test_kvd_killed_while_requests_flow_loses_no_request_and_no_worker(over_tcp: Deployment) -> None:
    over_tcp.ask(prompt_of(120, seed=4), ANSWER)  # the pair knows each other
    prompts = [prompt_of(150 + 10 * i, seed=5) for i in range(8)]
    prefilled = [over_tcp.prefill.submit(p, 1, PREFILL_PARAMS) for p in prompts]
    params = [future.result(120).kv_transfer_params for future in prefilled]
    host = over_tcp.decode_host
    port = cast("KvdStatus", host.ask(GetStatus())).endpoint.port
    workers = len(cast("WorkerList", host.ask(ListWorkers())).rows)
    assert workers == 2, "a worker and a scheduler"

    decoded = [over_tcp.decode.submit(p, ANSWER, q) for p, q in zip(prompts[:4], params[:4], strict=True)]
    host.process.kill()
    host.process.wait()
    decoded += [over_tcp.decode.submit(p, ANSWER, q) for p, q in zip(prompts[4:], params[4:], strict=True)]
    answers = [future.result(120) for future in decoded]

    assert [answer.error for answer in answers] == [""] * len(prompts)
    restarted = time.monotonic()
    host.process = start_kvd("decode", host.directory, listen=f"127.0.0.1:{port}").process
    wait_for(
        lambda: [r for r in cast("WorkerList", host.ask(ListWorkers())).rows if r.state == "alive"][
            workers - 1 :
        ],
        10.0,
    )
    measured(
        "all workers registered again after kvd's restart, start-up included", time.monotonic() - restarted
    )
    wait_for(lambda: len({row.record.request_id for row in transfers(over_tcp)}) >= len(prompts) + 1, 10.0)
    assert over_tcp.ask(prompt_of(130, seed=6), ANSWER).decoded.error == ""


def test_a_killed_worker_is_seen_and_its_leases_end(over_tcp: Deployment) -> None:
    """Last of this module: the prefiller does not come back."""
    prompt = prompt_of(220, seed=7)
    right = _alone(over_tcp, prompt)
    forget_prefixes(over_tcp.decode)
    prefilled = over_tcp.prefill.submit(prompt, 1, PREFILL_PARAMS).result(120)
    host = over_tcp.prefill_host
    wait_for(lambda: engine_of(host, "prefill-engine").leases == 1)

    killed = time.monotonic()
    for pid in engine_pids(over_tcp.prefill).executing:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: engine_of(host, "prefill-engine").state == "gone", 60.0)
    measured("a killed worker's engine shown as gone", time.monotonic() - killed)

    wait_for(lambda: engine_of(host, "prefill-engine").leases == 0, 5.0)
    decoded = over_tcp.decode.submit(prompt, ANSWER, prefilled.kv_transfer_params).result(120)
    assert decoded.error == ""
    assert decoded.token_ids == right
