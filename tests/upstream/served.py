"""The plugin for vLLM's tests of running servers. `servers` starts these and says in the environment where they are."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.support import fleet as fleets
from tests.support.daemons import ROOT, wait_for
from tests.support.deployments import HYBRID_BLOCK
from tests.support.openai_client import agree, ask_at_once
from tests.support.router_cases import many
from tests.support.routers import TOY
from tests.upstream.adapted import SERVED_MISSES
from tests.upstream.ledger import records, unexplained, unmoved

RULES = ROOT / "configs" / "monitoring" / "nixl-names.yaml"
ALONE = "KVD_TESTS_ALONE"
"""Environment: the URL of the engine without a connector."""
PROXY = "KVD_TESTS_PROXY"
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    # Steps of whole blocks, one request at a time: else its kernels on CPUs round otherwise once a prompt is cached.
    "qwen3.5-gdn": {
        "max_num_batched_tokens": HYBRID_BLOCK,
        "max_num_seqs": 1,
        "max_model_len": 8192,
        "mamba_cache_mode": "align",
    },
}
QUESTIONS = 100
TOKENS = 200


@contextlib.contextmanager
def servers(kind: str) -> Iterator[dict[str, str]]:
    """Servers of a tiny model and a proxy, and the environment in which tests find them."""
    with (
        tempfile.TemporaryDirectory(prefix="kvd-") as folder,
        fleets.fleet(kind, Path(folder), enable_prefix_caching=True, **OPTIONS[kind]) as fleet,
    ):
        found = {"TEST_MODEL": "tiny", ALONE: fleet.single, PROXY: fleet.router(TOY)}
        urls = {"PREFILL": fleet.prefill, "DECODE": fleet.decodes[0], "PROXY": fleet.router(TOY)}
        for name, url in urls.items():
            found |= {f"{name}_HOST": "127.0.0.1", f"{name}_PORT": str(urlsplit(url).port)}
        yield found
        # Answers without a load would say nothing of KvdConnector.
        loads = len(wait_for(lambda: fleet.loaded(0), 10.0))
        sys.stdout.write(f"{kind}: {loads} loads from the prefiller are in the decoder's ledger\n")
        written = records(fleet.hosts)
        counted = int(fleets.metric(fleet.decodes[0], "vllm:external_prefix_cache_hits_total"))
        rows = [*unexplained(written, SERVED_MISSES), *unmoved(written, counted)]
        assert not rows, "\n".join(["in the ledgers, and explained by nothing:", *rows])


def pytest_configure() -> None:
    lm_eval = ModuleType("lm_eval")
    lm_eval.simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    sys.modules["lm_eval"] = lm_eval


def simple_evaluate(*, model_args: str, tasks: str, **_: Any) -> dict[str, Any]:
    """The part of the answers that are those of an engine without a connector, as lm_eval gives a score."""
    given = dict(argument.split("=", 1) for argument in model_args.split(","))
    asked = many(TOKENS, QUESTIONS)
    right = ask_at_once(os.environ[ALONE], asked)  # in such company an engine alone rounds otherwise too
    replies = ask_at_once(given["base_url"].removesuffix("/v1/completions"), asked)
    equal = [agree(reply.choices, one.choices) for reply, one in zip(replies, right, strict=True)]
    return {"results": {tasks: {"exact_match,strict-match": sum(equal) / QUESTIONS}}}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        if hasattr(module, "EXPECTED_VALUES"):
            module.BASE_URL = f"{os.environ[PROXY]}/v1"
            module.EXPECTED_VALUES["tiny"] = 1.0
        if hasattr(module, "get_metric"):
            module.PROMPT = module.PROMPT[:6000]
            module.get_metric = _by_rules(module.get_metric)


def _by_rules(stock: Callable[..., float]) -> Callable[..., float]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules: Mapping[str, str] = {rule["record"]: rule["expr"] for group in groups for rule in group["rules"]}

    @wraps(stock)
    def get_metric(host: str, port: str, name: str) -> float:
        return stock(host, port, rules.get(name, name))

    return get_metric
