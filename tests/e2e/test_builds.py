"""Hand-overs and their faults on another vLLM than the one that everything else is tested with.

`make e2e-builds VLLM=0.26.0` runs it in an environment of that version and notes in docs/builds.md what came of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvctl.demo.engine import EngineAnswer
from kvd.vllm.builds.probe import SCHEDULER, probe
from tests.e2e.test_recovery import DEEDS, TIMES, Stand
from tests.support.builds_matrix import CELLS, noted
from tests.support.deployments import prompt_of, running
from tests.support.matrix import Cell
from tests.support.tiny_models import ONE_AT_A_TIME
from tests.support.vllm_builds import VERSION

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[2] / "docs" / "builds.md"
PATIENCE = 180.0
ONE_GROUP = ("llama", "deepseek-v2")
NO_MAMBA2 = ("0.26.0",)
"""The CPU builds whose only kernels for it are Triton's."""


def arguments(model: str) -> Mapping[str, Any]:
    """Our scheduler where vLLM's takes no failed loads of such a model; states as its CPU kernels want them."""
    needed = model not in ONE_GROUP and not probe().takes_failed_requests.holds
    scheduler = {"scheduler_cls": SCHEDULER} if needed else {}
    return scheduler | ({"mamba_ssm_cache_dtype": "float32"} if model == "qwen3-next" else {})


@pytest.fixture(scope="module", params=CELLS, ids=str)
def stand(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    cell: Cell = request.param
    if cell.model == "granite-hybrid" and VERSION in NO_MAMBA2:
        pytest.skip(f"the CPU build of vLLM {VERSION} has no kernels for Mamba2 but Triton's")
    with running(
        cell.model,
        tmp_path_factory.mktemp("stand"),
        mode=cell.mode,
        extra={"backend": cell.backend, **TIMES},
        cache_dir=tmp_path_factory.getbasetemp() / "cache",
        env={"UCX_TLS": "tcp,self"},  # over TCP, where a stopped peer sends nothing
        enable_prefix_caching=cell.caching,
        max_num_seqs=1 if cell.model in ONE_AT_A_TIME else 8,
        arguments=arguments(cell.model),
    ) as engines:
        yield Stand(cell, engines)


def equals(answer: EngineAnswer, references: Mapping[str, tuple[int, ...]]) -> str:
    """Which of the decoder's own answers this is."""
    assert answer.error == ""
    names = [name for name, tokens in references.items() if tokens == answer.token_ids]
    assert names, (answer.token_ids, references)
    return "both" if len(names) == len(references) else names[0]


@contextmanager
def note(stand: Stand, column: str) -> Iterator[list[str]]:
    """Write down what came of it, where that is asked for."""
    seen: list[str] = []
    try:
        yield seen
    except BaseException:
        seen[:] = ["**failed**"]
        raise
    finally:
        if os.environ.get("WRITE_BUILDS"):
            result = "/".join(dict.fromkeys(seen)) or "**failed**"
            PAGE.write_text(noted(PAGE.read_text(), VERSION, stand.cell, column, result))


def test_the_decoder_says_what_it_would_have_said_alone(stand: Stand) -> None:
    with note(stand, "handed over") as seen:
        for tokens in (100, 400, 1000):
            prompt = prompt_of(tokens, seed=tokens)
            references = stand.references(prompt)
            answer = stand.begin(prompt).result(PATIENCE)
            seen.append(equals(answer, references))
            assert (answer.num_cached_tokens or 0) >= tokens - 1, "it was computed here"
            stand.nothing_is_left()


@pytest.mark.parametrize("fault", ["flight", "layers", "killed"])
def test_a_fault_on_the_way(stand: Stand, fault: str) -> None:
    with note(stand, fault) as seen:
        prompt = stand.prompt()
        references = stand.references(prompt)
        seen.append(equals(DEEDS[fault](stand, prompt), references))
        stand.nothing_is_left()
