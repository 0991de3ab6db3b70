"""Configurations that vLLM's CPU build lacks, on vLLM's own scheduler, stepped by hand: ours and stock, side by side.

Nothing computes and nothing is moved; kvd says yes to everything. docs/matrix.md has what came of it, as `by hand`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.vllm.params import CONTRACT, finished_prefill
from kvd.wire.handshake import PeerReady
from kvd.wire.identity import EngineCard
from kvd.worker.cause import Cause
from kvd.worker.orders import PushEnd, PushStep
from tests.support.configurations import (
    ASYNCHRONOUS,
    BY_HAND,
    COLUMNS,
    CONFIGURATIONS,
    OFFLOADING_BEHIND,
    Connector,
    Setup,
)
from tests.support.odd_models import write as write_odd
from tests.support.rigs.bench import GENERATION, KEY, prefill, prompt
from tests.support.rigs.stepped import OURS, SteppedScheduler, WillingKvd, latents
from tests.support.tiny_models import write_model

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

BLOCK = 16
PROMPT = 100
TOKENS = list(range(10, 10 + PROMPT))
ANSWER = 5
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
PUSH = {"transfer_mode": "push", "kvd_transfer_id": "x", "kvd_contract": CONTRACT}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 26, "block_size": BLOCK},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm", reason="needs vLLM")
    return write_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def kvd(monkeypatch: pytest.MonkeyPatch) -> WillingKvd:
    script = WillingKvd()
    monkeypatch.setattr("kvd.vllm.connector.KvdSession", lambda card, push, **_: script.open(card, push))
    return script


Open = Callable[..., SteppedScheduler]


@pytest.fixture
def opened(model: Path, kvd: WillingKvd) -> Iterator[Open]:
    """Schedulers with these connectors, in a MultiConnector where there are several."""
    made: list[SteppedScheduler] = []

    def open_(*connectors: dict[str, Any], **more: Any) -> SteppedScheduler:
        several = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": list(connectors)},
        }
        given = several if len(connectors) > 1 else connectors[0]
        made.append(SteppedScheduler(**{"model": model, **more}, connector=given, block=BLOCK, chunk=64))
        kvd.push(kvd.peer)  # as kvd does ahead of requests
        return made[-1]

    yield open_
    for bench in made:
        bench.scheduler.shutdown()


def connector(name: Connector, mode: str) -> dict[str, Any]:
    if name == "KvdConnector":
        return {**OURS, "kv_connector_extra_config": {"mode": mode}}
    return {"kv_connector": name, "kv_role": "kv_both"}


def handed_over(name: Connector, mode: str) -> dict[str, Any]:
    """What a decoder is given, with the entries of ours and of stock."""
    if name == "KvdConnector" and mode == "push":
        where = {"remote_engine_id": "p", "remote_host": "h", "remote_port": 7}
        return {"do_remote_prefill": True, "do_remote_decode": False, **PUSH, **where}
    blocks = tuple(range(1, 1 + -(-PROMPT // BLOCK)))
    digest = prompt(TOKENS).digest(KEY, PROMPT)
    return finished_prefill(prefill((blocks,), tokens=PROMPT, digest=digest), tp=1, pp=1, dcp=1)


def decoded(bench: SteppedScheduler, name: str, params: dict[str, Any]) -> str:
    """What came of a request of which all was to be loaded: `loaded`, or how much was computed here."""
    request = bench.arrive(name, TOKENS, params)
    computed = bench.step()[0].get(name, 0)
    if request.status.name == "WAITING_FOR_REMOTE_KVS":
        computed += bench.step(finished_recving={name})[0].get(name, 0)
    while bench.scheduler.has_unfinished_requests():
        computed += bench.step()[0].get(name, 0)
    assert len(request.output_token_ids) == ANSWER
    return "loaded" if computed == ANSWER else f"{computed - ANSWER + 1} tokens computed here"


def rows(row: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("setup", "column"),
        [pytest.param(Setup(row, name), column, id=column) for column, (name, _) in COLUMNS.items()],
    )


@rows(ASYNCHRONOUS)
def test_with_asynchronous_scheduling_all_is_loaded_and_no_token_too_many_offered(
    opened: Open, setup: Setup, column: str, record_property: Callable[[str, object], None]
) -> None:
    """A step is scheduled ahead, so a prefiller's request counts a token that it has not sampled yet."""
    _, mode = COLUMNS[column]
    bench = opened(connector(setup.connector, mode), ahead=True)
    assert type(bench.scheduler).__name__ == "AsyncScheduler"
    assert decoded(bench, "d", handed_over(setup.connector, mode)) == "loaded"
    offered = prefilled(bench, "p")
    assert offered["remote_num_tokens"] == PROMPT
    assert sum(map(len, offered["remote_block_ids"])) == -(-PROMPT // BLOCK)
    record_property("found", BY_HAND)


def prefilled(bench: SteppedScheduler, name: str) -> dict[str, Any]:
    """What a prefiller gives for the router."""
    bench.arrive(name, TOKENS, dict(PREFILL), max_tokens=1)
    given: list[dict[str, Any]] = []
    while bench.scheduler.has_unfinished_requests() or bench.under_way:
        bench.step()
        given += [one.kv_transfer_params for one in bench.outputs if one.kv_transfer_params]
    (params,) = given
    return params


def pushed(bench: SteppedScheduler, name: str) -> list[int]:
    """The blocks that a prefiller tells its workers to push, all that there are."""
    bench.arrive(name, TOKENS, {**PREFILL, **PUSH}, max_tokens=1)
    steps: list[PushStep] = []
    while bench.scheduler.has_unfinished_requests() or bench.under_way:
        steps += bench.step()[1].orders.pushes
    assert {step.total for step in steps} == {PROMPT}
    assert steps[-1].reached == PROMPT
    return sorted({block for step in steps for _, ids in step.groups.values() for block in ids})


@rows(OFFLOADING_BEHIND)
def test_beside_an_offloading_connector_what_was_prefilled_elsewhere_is_loaded_from_there(
    opened: Open, setup: Setup, column: str, record_property: Callable[[str, object], None]
) -> None:
    _, mode = COLUMNS[column]
    bench = opened(connector(setup.connector, mode), OFFLOADING)
    assert decoded(bench, "d", handed_over(setup.connector, mode)) == "loaded"
    assert prefilled(bench, "p")["remote_num_tokens"] == PROMPT
    record_property("found", BY_HAND)


STEPPED = [row for row in CONFIGURATIONS if row.stepped is not None]


@pytest.mark.parametrize(
    ("setup", "column"),
    [
        pytest.param(Setup(row, name, column), column, id=f"{row}-{column.replace(' ', '_')}")
        for row in STEPPED
        for column, (name, _) in COLUMNS.items()
    ],
)
def test_what_a_prefiller_of_several_workers_offers_is_loaded_whole(
    opened: Open,
    kvd: WillingKvd,
    tmp_path: Path,
    setup: Setup,
    column: str,
    record_property: Callable[[str, object], None],
) -> None:
    row, (name, mode) = setup.configuration, COLUMNS[column]
    assert row.stepped is not None
    model = (write_odd if row.model == "experts" else write_model)(row.model, tmp_path)
    groups = [latents(BLOCK)] if row.model == "deepseek-v2" else ()
    given = {**connector(name, mode), "kv_role": "kv_producer", "engine_id": "p"}
    if expected := row.found.get(column):
        with pytest.raises(ValueError, match=re.escape(expected.split("`")[1])):
            opened(given, groups=groups, model=model, parallel=row.stepped)
        record_property("found", expected)
        return
    prefiller = opened(given, groups=groups, model=model, parallel=row.stepped)
    if pushes := (name, mode) == ("KvdConnector", "push"):
        blocks, params = pushed(prefiller, "p"), handed_over(name, mode)
    else:
        params = prefilled(prefiller, "p")
        (blocks,) = params["remote_block_ids"]
        assert params["remote_num_tokens"] == PROMPT
    assert len(blocks) == -(-PROMPT // (BLOCK * row.stepped.get("decode_context_parallel_size", 1)))
    if name == "KvdConnector" and not pushes:
        card = kvd.card()
        engine = EngineCard(engine=card.engine, generation=GENERATION, workers=(), digest_key=card.digest_key)
        kvd.peer = PeerReady(local_engine="d", peer=engine)
    decoder = opened(connector(name, mode), groups=groups, model=model)
    assert decoded(decoder, "d", params) == "loaded"
    record_property("found", BY_HAND)


def test_a_worker_whose_kv_is_a_copy_of_anothers_is_no_worker_to_kvd_and_holds_no_blocks_back(
    opened: Open, kvd: WillingKvd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a prefill-context-parallel rank: vLLM frees blocks once all of its workers have said that they may go."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvd.vllm.connector import KvdConnector

    bench = opened(OURS)
    bench.arrive("r", TOKENS, None)
    metadata = bench.step()[1]
    monkeypatch.setattr("kvd.vllm.connector.is_copy", lambda _config: True)
    monkeypatch.setattr(kvd, "open", lambda *_: pytest.fail("it registered"))
    worker = KvdConnector(bench.config, KVConnectorRole.WORKER, bench.caches)
    worker.register_kv_caches({"layer0": None})
    metadata.orders.freed.append("pulled")
    aborted = Cause("it was aborted", "PREFILL_ENDED")
    metadata.orders.push_ends.extend([PushEnd("t", "pushed", 30.0), PushEnd("u", "aborted", 0.0, aborted)])
    worker.bind_connector_metadata(metadata)
    assert worker.get_transfer_results(set()).finished_sending == {"pulled", "pushed"}
    assert worker.get_transfer_results(set()).finished_sending == set()
    worker.shutdown()
