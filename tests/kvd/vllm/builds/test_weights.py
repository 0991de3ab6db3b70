"""What an engine tells of its weights: by its setting, its files, the hub's cache, or why it cannot say."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.vllm.builds import weights
from kvd.vllm.builds.weights import weights_facts
from kvd.worker.settings import ConnectorSettings, read_settings
from tests.support.checkpoints import tensor, write_checkpoint

CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "rope_theta": 10000.0}
TENSORS = {"a": tensor(1, 64, 64), "b": tensor(2, 64)}


class HfConfig(SimpleNamespace):
    """What vLLM made of a configuration."""

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def configured(
    model: str | Path, *, load_format: str = "auto", download_dir: str | None = None, **others: Any
) -> Any:
    """A vLLM configuration, as far as weights are asked of it."""
    hf = HfConfig(**CONFIG)
    given = {
        "revision": None,
        "hf_overrides": {},
        "max_model_len": 1024,
        "hf_config": hf,
        "hf_text_config": hf,
        **others,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), **given),
        load_config=SimpleNamespace(load_format=load_format, download_dir=download_dir),
        kv_transfer_config=SimpleNamespace(engine_id="e"),
    )


def facts(model: str | Path, settings: ConnectorSettings | None = None, **others: Any) -> dict[str, str]:
    weights._found.clear()
    return weights_facts(configured(model, **others), settings or ConnectorSettings())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "one", TENSORS, CONFIG)


def test_a_folder_tells_its_weights_and_its_configuration(folder: Path, tmp_path: Path) -> None:
    told = facts(folder)
    assert told.keys() == {"config", "weights", "weights_source"}
    assert told["weights_source"] == "safetensors"
    assert facts(shutil.copytree(folder, tmp_path / "copy")) == told


def test_other_weights_and_other_configurations_are_told_apart(folder: Path, tmp_path: Path) -> None:
    told = facts(folder)
    tuned = facts(write_checkpoint(tmp_path / "tuned", TENSORS | {"b": tensor(3, 64)}, CONFIG))
    assert (tuned["weights"] != told["weights"], tuned["config"]) == (True, told["config"])
    turned = facts(write_checkpoint(tmp_path / "turned", TENSORS, CONFIG | {"rope_theta": 1e6}))
    assert (turned["weights"], turned["config"] != told["config"]) == (told["weights"], True)


def test_overrides_count_as_if_they_stood_in_the_file(folder: Path, tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path / "b", TENSORS, CONFIG | {"rope_theta": 1e6})
    assert facts(folder, hf_overrides={"rope_theta": 1e6}) == facts(written)
    assert facts(folder, hf_overrides=lambda config: config)["config"] != facts(folder)["config"]


@pytest.mark.parametrize(("length", "same"), [(2048, True), (4096, True), (8192, False)])
def test_long_factors_follow_from_the_longest_text(folder: Path, length: int, same: bool) -> None:
    rope = {"long_factor": [1.0], "original_max_position_embeddings": 4096}
    text = SimpleNamespace(rope_parameters=rope)
    short = facts(folder, hf_text_config=text, max_model_len=1024)
    assert (facts(folder, hf_text_config=text, max_model_len=length) == short) is same


def test_without_a_file_the_configuration_is_vllms(folder: Path) -> None:
    (folder / "config.json").unlink()
    told = facts(folder)
    assert told["config"].startswith("v1-")
    assert told["weights"].startswith("w1-")


def test_a_hubs_name_is_looked_up_in_the_cache_of_this_host(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    model = cache / "models--org--name"
    shutil.copytree(folder, model / "snapshots/abc")
    (model / "refs").mkdir()
    (model / "refs/main").write_text("abc")
    for revision in (None, "abc"):
        told = facts("org/name", revision=revision, download_dir=str(cache))
        assert told["weights"] == facts(folder)["weights"]
    assert facts("org/other", download_dir=str(cache))["weights_source"] == (
        "unknown: the model is no folder here, and the hub's cache has no snapshot of revision main"
    )


def test_what_streams_from_elsewhere_is_unknown(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = facts(folder, model_weights="s3://bucket/model")
    assert (told["weights_source"], "weights" in told) == ("unknown: they come from s3 storage", False)
    assert told["config"] == facts(folder)["config"]
    assert 'set "weights" in kv_connector_extra_config' in caplog.text
    assert facts("s3://bucket/model")["weights_source"] == "unknown: they come from s3 storage"


def test_a_setting_stands_for_the_weights(folder: Path) -> None:
    told = facts(folder, read_settings({"weights": "llama-2026-11"}))
    assert (told["weights"], told["weights_source"]) == ("llama-2026-11", "setting")
    assert told["config"] == facts(folder)["config"]


def test_off_tells_nothing_and_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_find", lambda *_: pytest.fail("read"))
    assert facts("/m", read_settings({"weights": "off"})) == {"weights_source": "off"}


def test_nothing_that_goes_wrong_keeps_an_engine_from_starting(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "weights_fingerprint", lambda *_: 1 // 0)
    assert facts(folder) == {
        "weights_source": "unknown: ZeroDivisionError: integer division or modulo by zero"
    }


def test_both_halves_of_a_process_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = facts(folder)
    monkeypatch.setattr(weights, "_find", lambda *_: pytest.fail("read again"))
    assert weights_facts(configured(folder), ConnectorSettings()) == first


def test_one_line_says_what_was_found_and_how_long_it_took(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvd")
    told = facts(folder)
    (line,) = caplog.messages
    assert line.startswith(
        f"weights {told['weights']} (safetensors), configuration {told['config']}, found in 0."
    )


def test_damaged_files_are_a_warning_with_the_next_step(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "config.json").write_text(json.dumps([1]))
    told = facts(folder)
    assert told["weights_source"] == "unknown: model.safetensors: 0 bytes are no safetensors file"
    assert told["config"].startswith("v1-")
    assert "the weights of this engine are unknown: model.safetensors: 0 bytes" in caplog.text
