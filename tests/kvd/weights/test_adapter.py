"""A LoRA adapter is known by what it holds, not by where it lies."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvd.weights import adapter
from kvd.weights.adapter import BY_NAME, adapter_fingerprint
from tests.support.checkpoints import tensor, write_safetensors

CONFIG: dict[str, Any] = {
    "base_model_name_or_path": "meta-llama/Llama-3.1-8B",
    "peft_type": "LORA",
    "r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "target_modules": ["q_proj", "v_proj"],
}
TENSORS = {
    f"base_model.model.layers.{layer}.{module}.lora_{side}.weight": tensor(layer * 10 + number, 16, 1024)
    for layer in range(4)
    for number, (module, side) in enumerate((m, s) for m in ("q_proj", "v_proj") for s in "AB")
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "one")


def written(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    write_safetensors(folder / "adapter_model.safetensors", TENSORS)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_a_copy_elsewhere_is_the_same_adapter(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    assert adapter_fingerprint(str(folder)) == adapter_fingerprint(f"{other}/")
    assert not adapter_fingerprint(str(folder)).startswith(BY_NAME)


def test_what_is_not_the_adapters_own_changes_nothing(folder: Path, tmp_path: Path) -> None:
    config = {
        **CONFIG, "base_model_name_or_path": "/m/llama", "peft_version": "0.17", "revision": None,
        "target_modules": ["v_proj", "q_proj"], "lora_dropout": 0.0,
    }  # fmt: skip
    assert adapter_fingerprint(str(folder)) == adapter_fingerprint(str(written(tmp_path / "b", config)))


@pytest.mark.parametrize(
    "change", [{"r": 8}, {"lora_alpha": 16}, {"target_modules": ["q_proj"]}, {"use_rslora": True}]
)
def test_another_configuration_is_another_adapter(
    folder: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    other = written(tmp_path / "b", CONFIG | change)
    assert adapter_fingerprint(str(folder)) != adapter_fingerprint(str(other))


def test_other_weights_under_the_same_path_are_seen_at_once(folder: Path) -> None:
    before = adapter_fingerprint(str(folder))
    name = max(TENSORS)
    write_safetensors(folder / "new", TENSORS | {name: tensor(1000, 16, 1024)})
    (folder / "new").replace(folder / "adapter_model.safetensors")
    assert adapter_fingerprint(str(folder)) != before


def test_files_are_read_once_for_each_state_of_theirs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = adapter_fingerprint(str(folder))
    monkeypatch.setattr(adapter, "_digest", lambda _: pytest.fail("read again"))
    assert adapter_fingerprint(str(folder)) == before


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "KEPT", 3)
    for number in range(5):
        adapter_fingerprint(str(written(tmp_path / str(number))))
    assert len(adapter._known) == 3


def test_torchs_format_is_taken_as_bytes(tmp_path: Path) -> None:
    made = []
    for number, data in enumerate((b"a" * 70_000, b"a" * 70_000, b"b" * 70_000)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "adapter_model.bin").write_bytes(data)
        (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
        made.append(adapter_fingerprint(str(folder)))
    assert made[0] == made[1] != made[2]


def test_without_a_folder_the_name_is_all_that_is_known(tmp_path: Path) -> None:
    one, same, other = map(adapter_fingerprint, ("org/adapter", "org/adapter", str(tmp_path / "none")))
    assert one == same != other
    assert one.startswith(BY_NAME)
    assert other.startswith(BY_NAME)


def test_a_hubs_name_is_what_the_cache_of_this_host_has_of_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert adapter_fingerprint("org/adapter").startswith(BY_NAME)
    held = tmp_path / "hub/models--org--adapter"
    shutil.copytree(folder, held / "snapshots/abc")
    (held / "refs").mkdir()
    (held / "refs/main").write_text("abc\n")
    assert adapter_fingerprint("org/adapter") == adapter_fingerprint(str(folder))


@pytest.mark.parametrize("path", ["", "\0", "a" * 5000, "\udcff", "a/\0", f"a/{'b' * 5000}", "a/\udcff"])
def test_no_name_is_an_error(path: str) -> None:
    assert adapter_fingerprint(path).startswith(BY_NAME)


@pytest.mark.parametrize(
    "config", ["", "[1]", "{", "[" * 100_000, '{"r": ' + '{"a":' * 900 + "1" + "}" * 901]
)
def test_a_configuration_that_is_none_leaves_the_name(folder: Path, config: str) -> None:
    (folder / "adapter_config.json").write_text(config)
    assert adapter_fingerprint(str(folder)).startswith((BY_NAME, "a1-"))


def test_a_pipe_in_the_place_of_weights_is_not_waited_for(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")
    assert adapter_fingerprint(str(folder)).startswith(BY_NAME)


@pytest.mark.parametrize("path", ["~a\0b", "~\ud800", "a\0b/c", "org/\ud800", "/x\0y"])
def test_a_path_that_is_none_is_known_by_its_name(path: str) -> None:
    assert adapter_fingerprint(path).startswith(BY_NAME)
