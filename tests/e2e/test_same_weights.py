"""Real engines: other weights under one name are refused, the same weights under two names fit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvctl.demo import models
from kvctl.demo.deployment import Deployment, engine_id
from tests.support.deployments import prompt_of, running, transfers, transfers_of
from tests.support.forgetting import forget_prefixes
from tests.support.tiny_models import write_model

pytestmark = pytest.mark.e2e

PROMPTS = [prompt_of(tokens, seed) for seed, tokens in enumerate((150, 300, 450, 600))]
ANSWER = 12


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The prefiller has weights from another seed, both serve them as ``llama``."""
    folder = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "SEED", models.SEED + 1)
        other = write_model("llama", folder / "other")
    name = {"served_model_name": "llama"}
    with running("llama", folder, prefill={"model": other, "arguments": name}, arguments=name) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def renamed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The prefiller has a copy of the model in another folder and serves it under another name."""
    folder = tmp_path_factory.mktemp("renamed")
    copy = shutil.copytree(write_model("llama", folder / "models"), folder / "a-copy")
    prefill = {"model": copy, "arguments": {"served_model_name": "chat-large"}}
    with running("llama", folder, prefill=prefill, arguments={"served_model_name": "tenant-7"}) as deployment:
        yield deployment


def kvctl(deployment: Deployment, *words: str) -> tuple[int, Any]:
    """The exit code and the document of kvctl on the decoder's host."""
    command = [sys.executable, "-m", "kvctl", "--runtime-dir", str(deployment.decode_host.directory), *words]
    done = subprocess.run([*command, "-o", "json"], check=False, capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout)


def engines(deployment: Deployment) -> tuple[str, str]:
    return engine_id(deployment.decode_host), engine_id(deployment.prefill_host)


def test_other_weights_under_one_name_are_never_loaded_from(tuned: Deployment) -> None:
    for prompt in PROMPTS:
        alone = tuned.decode.submit(prompt, ANSWER).result(120)
        forget_prefixes(tuned.decode)
        asked = tuned.ask(prompt, ANSWER)
        assert asked.decoded.error == ""
        assert asked.decoded.token_ids == alone.token_ids
        assert asked.prefilled.token_ids != alone.token_ids[:1]
        forget_prefixes(tuned.decode)
    assert [t for t in transfers(tuned.decode_host) if t.state == "done"] == []


def test_the_refusal_names_both_values_and_the_next_step(tuned: Deployment) -> None:
    tuned.ask(PROMPTS[0], ANSWER)
    _, document = kvctl(tuned, "engines")
    values = {row["engine_id"]: row["facts"]["weights"] for row in document["engines"]}
    here, there = (values[name] for name in engines(tuned))
    said = tuned.decode.spec.log_path.read_text(errors="replace")
    assert f"weights is {here} here and {there} there" in said
    assert 'set "weights" in kv_connector_extra_config' in said
    code, compared = kvctl(tuned, "diff", *engines(tuned))
    assert (code, compared["compatible"]) == (1, False)
    assert [f["name"] for f in compared["factors"] if not f["ok"]] == ["weights"]


@pytest.mark.matrix
def test_one_model_under_two_names_is_loaded(renamed: Deployment) -> None:
    for prompt in PROMPTS:
        alone = renamed.decode.submit(prompt, ANSWER).result(120)
        forget_prefixes(renamed.decode)
        asked = renamed.ask(prompt, ANSWER)
        assert asked.decoded.token_ids == alone.token_ids
        assert [t.state for t in transfers_of(renamed, asked.prefilled)] == ["done"]
    _, compared = kvctl(renamed, "diff", *engines(renamed))
    names = next(factor for factor in compared["factors"] if factor["name"] == "model")
    assert (names["local"], names["remote"], names["ok"], names["differs"]) == (
        "tenant-7",
        "chat-large",
        True,
        False,
    )
    assert [f for f in compared["factors"] if not f["ok"]] == []


def test_an_engine_says_at_start_what_it_found_and_how_long_that_took(tuned: Deployment) -> None:
    said = tuned.decode.spec.log_path.read_text(errors="replace")
    found = re.findall(r"weights w1-\w{16} \(safetensors\).* found in ([\d.]+) s", said)
    assert found
    assert max(float(seconds) for seconds in found) < 5
