"""Which files of a folder are its weights, and what is said where that cannot be known."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from kvd.weights.checkpoint import Fingerprint, read_configuration, weights_fingerprint
from kvd.weights.errors import WeightsUnreadable
from kvd.weights.hub import hub_cache
from tests.support.checkpoints import tensor, write_checkpoint, write_safetensors

TENSORS = {f"layers.{n}": tensor(n, 32, 32) for n in range(6)}
NAMES = sorted(TENSORS)
OTHERS = {name: tensor(n + 100, 32, 32) for n, name in enumerate(NAMES)}


def known(place: Path, load_format: str = "auto") -> str:
    found = weights_fingerprint(place, load_format)
    assert found.value, found.source
    return found.value


def test_copies_have_one_value_however_they_are_split(tmp_path: Path) -> None:
    one = write_checkpoint(tmp_path / "one", TENSORS)
    split = write_checkpoint(tmp_path / "split", TENSORS, shards=(NAMES[:1], NAMES[1:4], NAMES[4:]))
    assert known(one) == known(split) == known(shutil.copytree(one, tmp_path / "copy"))
    assert known(one) != known(write_checkpoint(tmp_path / "other", OTHERS))
    assert known(one).startswith("w1-")
    assert len(known(one)) == 19


def test_the_value_of_this_version_stays(tmp_path: Path) -> None:
    """Another way to make it must have another prefix, or a rolling upgrade refuses every pair of engines."""
    assert (
        known(write_checkpoint(tmp_path, {"a": tensor(1, 300, 300), "b": tensor(2, 8, dtype="F32")}))
        == "w1-362d753f54c7dd90"
    )


def test_a_hub_cache_is_links_into_blobs(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", TENSORS)
    snapshot = tmp_path / "hub/snapshots/abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "hub/blobs").mkdir()
    for number, file in enumerate(sorted(plain.iterdir())):
        shutil.copy(file, tmp_path / "hub/blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert known(snapshot) == known(plain)


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({"HF_HOME": ""}, str(Path.home() / ".cache/huggingface/hub")),
    ],
)
def test_the_hubs_cache_is_where_the_library_has_it(environment: dict[str, str], place: str) -> None:
    assert hub_cache(environment) == Path(place)


def test_only_what_the_index_names_is_loaded(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", TENSORS, shards=(NAMES,))
    before = known(folder)
    write_safetensors(folder / "extra.safetensors", OTHERS)
    assert known(folder) == before


def test_mistrals_own_files_come_first_where_vllm_takes_them(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", TENSORS)
    write_safetensors(folder / "consolidated.safetensors", OTHERS)
    other = known(write_checkpoint(tmp_path / "b", OTHERS))
    assert known(folder, "auto") == known(folder, "mistral") == other
    assert known(folder, "hf") != other


def test_other_formats_are_taken_as_bytes(tmp_path: Path) -> None:
    for name, data in (("a", b"x" * 200_000), ("b", b"x" * 200_000), ("c", b"y" * 200_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pytorch_model.bin").write_bytes(data)
        (tmp_path / name / "optimizer.bin").write_bytes(name.encode())
    assert weights_fingerprint(tmp_path / "a").source == "files"
    assert known(tmp_path / "a") == known(tmp_path / "b") != known(tmp_path / "c")


def test_a_single_file_may_be_the_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" * 1000)
    assert weights_fingerprint(tmp_path / "model.gguf", "gguf").source == "files"


def test_dummy_weights_are_alike() -> None:
    assert weights_fingerprint(Path("/nowhere"), "dummy") == Fingerprint("dummy", "dummy")


@pytest.mark.parametrize(
    ("load_format", "said"),
    [
        ("auto", "unknown: no file of weights for load format auto is there"),
        ("sharded_state", "unknown: weights of load format sharded_state are not read here"),
        ("tensorizer", "unknown: weights of load format tensorizer are not read here"),
        ("somebodys", "unknown: weights of load format somebodys are not read here"),
    ],
)
def test_what_is_not_known_has_its_reason(tmp_path: Path, load_format: str, said: str) -> None:
    assert weights_fingerprint(tmp_path, load_format) == Fingerprint("", said)


def test_what_is_damaged_has_its_reason(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", TENSORS, shards=(NAMES[:3], NAMES[3:]))
    index = folder / "model.safetensors.index.json"
    shard = folder / "model-00002-of-00002.safetensors"
    os.truncate(shard, 300)
    assert weights_fingerprint(folder).source.startswith(f"unknown: {shard.name}: 'layers.3' is at bytes")
    shard.unlink()
    assert (
        weights_fingerprint(folder).source == f"unknown: {index.name} names {shard.name}, which is not there"
    )
    index.write_text("{}")
    assert weights_fingerprint(folder).source == f"unknown: {index.name}: it has no weight_map"
    index.write_text("{")
    assert weights_fingerprint(folder).source.startswith(f"unknown: {index.name}: ")
    assert weights_fingerprint(tmp_path / "none").source == "unknown: No such file or directory"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_has_its_reason(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", TENSORS)
    (folder / "model.safetensors").chmod(0)
    assert weights_fingerprint(folder).source == "unknown: model.safetensors: Permission denied"


def test_the_configuration_is_the_models_own_file(tmp_path: Path) -> None:
    with pytest.raises(WeightsUnreadable, match=r"no config.json or params.json"):
        read_configuration(tmp_path)
    (tmp_path / "params.json").write_text(json.dumps({"dim": 1}))
    assert read_configuration(tmp_path) == {"dim": 1}
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 2}))
    assert read_configuration(tmp_path) == {"hidden_size": 2}
