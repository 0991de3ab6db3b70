"""Engines with vLLM's own MooncakeConnector: described, compared, asked a thousand times, and they serve on."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvctl.demo.deployment import PREFILL_PARAMS, engines
from kvctl.demo.engine import EngineProcess
from kvctl.demo.engine_spec import EngineSpec
from tests.support import nursery
from tests.support.asked import Said, ask, said
from tests.support.configured import LOOPBACK, free_ports
from tests.support.deployments import found_out, prompt_of
from tests.support.engine_calls import engine_metrics
from tests.support.tiny_models import write_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

SECONDS = 600.0
"""For an engine to start and for an answer: the machine may be busy with other things."""
TP = (2, 1)
"""Workers of the engine that prefills and of the one that decodes."""
BOTH = "kv_both"
"""Only engines that may prefill have a bootstrap server."""


@dataclass(frozen=True)
class StockPair:
    """A prefiller and a decoder, each with the port of its bootstrap server."""

    engines: tuple[EngineProcess, EngineProcess]
    ports: tuple[int, int]
    model: Path

    def address(self, side: int, options: str = "") -> str:
        """Of the prefiller (0) or the decoder (1)."""
        return f"mooncake://{LOOPBACK}:{self.ports[side]}{options}"

    def known(self, side: int) -> str:
        """The same with the model, so that pages are known."""
        return self.address(side, f":model={self.model},dtype=float32,block_size=128")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StockPair]:
    pytest.importorskip("vllm", reason="needs vLLM")
    pytest.importorskip("mooncake", reason="needs Mooncake")
    folder = tmp_path_factory.mktemp("mooncake")
    model = write_model("llama", folder / "models")
    ports = free_ports(), free_ports()
    with engines(nursery.start) as start:
        prefill, decode = (
            start(
                EngineSpec(
                    model=model,
                    work_dir=folder / name,
                    log_path=folder / f"{name}.log",
                    max_model_len=2048,
                    tensor_parallel_size=tp,
                    enable_prefix_caching=False,
                    cache_dir=found_out(folder),
                    kv_transfer_config={
                        "kv_connector": "StockMooncakeConnector",
                        "kv_connector_module_path": "tests.support.stock_mooncake",
                        "kv_role": BOTH,
                        "engine_id": f"stock-{name}",
                        "kv_load_failure_policy": "recompute",
                        "kv_connector_extra_config": {"mooncake_protocol": "tcp", "num_workers": 1},
                    },
                    env={"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port), "VLLM_HOST_IP": LOOPBACK},
                )
            )
            for name, tp, port in zip(("prefill", "decode"), TP, ports, strict=True)
        )
        for engine in (prefill, decode):
            engine.wait_ready(SECONDS)
        yield StockPair((prefill, decode), ports, model)


def kvctl(*words: str) -> tuple[int, Any]:
    """The exit code of a command, and its document; what is no document is an error of the test."""
    command = [sys.executable, "-m", "kvctl", *words, "-o", "json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def engine_id(pair: StockPair, side: int) -> str:
    """As its bootstrap server tells it: vLLM adds the data parallel rank to a name that was given."""
    _, told = kvctl("probe", pair.address(side))
    [name] = told["engine_ids"]
    return str(name)


def handed_over(pair: StockPair, prompt: list[int]) -> Said:
    """What the decoder answers with the prefiller's KV."""
    prefill, decode = pair.engines
    transfer = {"transfer_id": uuid.uuid4().hex}
    first = said(ask(prefill, prompt, 1, {**PREFILL_PARAMS, **transfer}), SECONDS)
    assert not first.error, first.error
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": engine_id(pair, 0),
        "remote_bootstrap_addr": f"http://{LOOPBACK}:{pair.ports[0]}",
        **transfer,
    }
    return said(ask(decode, prompt, 12, params), SECONDS)


def loaded(pair: StockPair) -> int:
    """How many tokens the decoder had from others so far."""
    return int(engine_metrics(pair.engines[1], SECONDS).values.get("vllm:external_prefix_cache_hits", 0))


def test_the_topology_of_two_bootstrap_servers_is_that_of_the_engines_behind_them(pair: StockPair) -> None:
    code, told = kvctl("describe-topology", "--from", pair.known(0), "--to", pair.known(1))
    [described] = told["pairs"]
    assert (code, described["compatible"]) == (0, True), described
    assert (described["remote"]["tp"], described["local"]["tp"]) == TP
    assert {(read["local_rank"], read["remote_rank"]) for read in described["reads"]} == {
        ("tp0", "tp0"),
        ("tp0", "tp1"),
    }
    assert described["remote"]["engine_id"] == engine_id(pair, 0)


def test_a_mismatched_pair_is_told_factor_by_factor(pair: StockPair) -> None:
    code, told = kvctl("diff", pair.address(1), pair.address(0))
    factors = {factor["name"]: factor for factor in told["factors"]}
    assert code == 1
    assert (factors["tp"]["local"], factors["tp"]["remote"], factors["tp"]["differs"]) == ("1", "2", True)
    assert [name for name, factor in factors.items() if factor["differs"]] == ["tp"]
    assert "block_size" not in factors, "no bootstrap server tells it"
    other = pair.known(1).replace("block_size=128", "block_size=64,cache_dtype=bfloat16")
    code, told = kvctl("diff", other, pair.known(0))
    differing = {f["name"]: (f["local"], f["remote"]) for f in told["factors"] if f["differs"]}
    assert code == 1
    assert differing["tp"] == ("1", "2")
    assert differing["block sizes"] == ("64", "128")
    [plan] = [f for f in told["factors"] if f["name"] == "plan"]
    assert "bfloat16 (2 bytes) here and float32 (4 bytes) there" in plan["note"]


def test_after_a_thousand_questions_it_serves_on(pair: StockPair) -> None:
    code, told = kvctl("probe", pair.address(0), "--count", "1000")
    assert (code, told["asked"], told["answered"], told["engines"]) == (0, 1000, 1000, 1)
    prompt = prompt_of(700)
    alone = said(ask(pair.engines[1], prompt, 12), SECONDS)
    before = loaded(pair)
    answer = handed_over(pair, prompt)
    assert (answer.error, answer.token_ids) == ("", alone.token_ids)
    assert loaded(pair) > before


def test_doctor_finds_nothing_wrong_with_them(pair: StockPair) -> None:
    code, told = kvctl("doctor", "--from", pair.known(0), "--to", pair.known(1))
    assert code == 0, told
    assert "STOCK_PAIR" in {check["code"] for check in told["checks"] if check["state"] == "ok"}
