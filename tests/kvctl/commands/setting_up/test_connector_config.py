"""`kvctl connector-config`: what it prints is what vLLM and the connector take."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

import pytest

from kvd.worker.settings import read_settings

if TYPE_CHECKING:
    from tests.kvctl.conftest import Run


def config(line: str) -> dict[str, object]:
    """What a shell hands to vLLM."""
    [word] = shlex.split(line)
    flag, _, value = word.partition("=")
    assert flag == "--kv-transfer-config"
    found: dict[str, object] = json.loads(value)
    return found


@pytest.mark.parametrize(
    ("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer"), ("both", "kv_both")]
)
def test_a_role_is_all_that_has_to_be_said(run: Run, role: str, kv_role: str) -> None:
    outcome = run("connector-config", "--role", role)
    assert (outcome.code, outcome.err) == (0, "")
    assert config(outcome.out) == {
        "kv_connector": "KvdConnector",
        "kv_connector_module_path": "kvd.vllm",
        "kv_role": kv_role,
        "kv_load_failure_policy": "recompute",
    }


def test_entries_are_json_or_text_and_the_engine_is_told_of_the_kvd_that_was_named(run: Run) -> None:
    outcome = run(
        "connector-config", "--role", "decode", "--engine-id", "d'0", "--backend", "auto", "--mode", "push",
        "--set", "load_timeout=10", "--set", "weights=it's mine", "--set", 'backend_options={"a": 1}',
        "--runtime-dir", "/srv/pair/run",
    )  # fmt: skip
    extra = config(outcome.out)["kv_connector_extra_config"]
    assert config(outcome.out)["engine_id"] == "d'0"
    assert extra == {
        "load_timeout": 10,
        "weights": "it's mine",
        "backend_options": {"a": 1},
        "backend": "auto",
        "mode": "push",
        "runtime_dir": "/srv/pair/run",
    }
    assert isinstance(extra, dict)
    assert read_settings(extra).weights == "it's mine"
    assert len(outcome.out.split()) == 1, "a terminal breaks lines at blanks"


def test_programs_get_the_value_itself(run: Run) -> None:
    document = json.loads(run("connector-config", "--role", "prefill", "-o", "json").out)
    assert (document["kind"], document["flag"]) == ("ConnectorConfig", "--kv-transfer-config")
    assert document["config"] == config(run("connector-config", "--role", "prefill").out)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--set", "load_timeot=1"), "did you mean load_timeout?"),
        (("--set", "load_timeout=soon"), "load_timeout is 'soon'; it must be a number from 0.01"),
        (("--set", "load_timeout"), "'load_timeout' is not NAME=VALUE"),
        (("--set", "probe=true", "--set", "probe=false"), "probe is given twice"),
        (("--mode", "push", "--set", "mode=pull"), "mode is given twice"),
        (("--backend", "nixle"), "did you mean nixl?"),
        (("--engine-id", "\t"), "is no name"),
    ],
)
def test_what_an_engine_would_refuse_is_refused_here(run: Run, arguments: tuple[str, ...], told: str) -> None:
    outcome = run("connector-config", "--role", "decode", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert told in outcome.err


def test_policy_fail_is_pointed_out(run: Run) -> None:
    outcome = run("connector-config", "--role", "decode", "--policy", "fail")
    assert outcome.code == 0
    assert "ends in an error" in outcome.err
    assert config(outcome.out)["kv_load_failure_policy"] == "fail"
