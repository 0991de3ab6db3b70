"""What is asked of vLLM for the order of KV memory's dimensions, and whether it may sleep."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvd.vllm.builds import versions
from kvd.vllm.builds.versions import check_sleep, joins_layers, required_layout
from kvd.vllm.errors import UnsupportedBuild
from kvd.worker.settings import read_settings


def configured(*, mla: bool = False) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(use_mla=mla))


@pytest.mark.parametrize(
    ("extra", "mla", "before", "since"),
    [
        ({}, False, "HND", "LBHNC"),
        ({"mode": "push"}, False, "HND", "LBHNC"),
        ({"outermost": "layer"}, False, "HND", "LBHNC"),
        ({"outermost": "block"}, False, "HND", "BLHNC"),
        ({}, True, None, None),
        ({"outermost": "block"}, True, None, "BLHNC"),
    ],
)
def test_heads_come_before_tokens_and_layers_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], mla: bool, before: str | None, since: str | None
) -> None:
    settings = read_settings(extra)
    for names_layers, expected in ((False, before), (True, since)):
        monkeypatch.setattr(versions, "_names_layers", lambda known=names_layers: known)
        assert required_layout(configured(mla=mla), settings) == expected


def test_nothing_is_asked_without_a_model() -> None:
    assert required_layout(SimpleNamespace(model_config=None), read_settings({})) is None


@pytest.mark.parametrize(
    ("extra", "joined"),
    [
        ({}, True),
        ({"mode": "push"}, False),
        ({"mode": "push", "outermost": "block"}, True),
        ({"outermost": "layer"}, False),
    ],
)
def test_builds_that_can_only_be_asked_to_join_layers_are_for_pulls(
    extra: dict[str, Any], joined: bool
) -> None:
    assert joins_layers(read_settings(extra)) is joined


def test_sleep_mode_needs_a_vllm_that_tells_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    base = ModuleType("vllm.distributed.kv_transfer.kv_connector.v1.base")
    monkeypatch.setitem(sys.modules, base.__name__, base)
    awake = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=False))
    sleeps = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))

    base.KVConnectorBase_V1 = type("Base", (), {})  # type: ignore[attr-defined]
    check_sleep(awake)
    with pytest.raises(UnsupportedBuild, match=r"--enable-sleep-mode: vLLM .* use vLLM 0.33 or later"):
        check_sleep(sleeps)

    base.KVConnectorBase_V1 = type("Base", (), {"restore_kv_caches": None})  # type: ignore[attr-defined]
    check_sleep(sleeps)
