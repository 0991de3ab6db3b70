"""The tiny models: complete folders, the same bytes every time, sizes that suit a test."""

import hashlib
import importlib.util
import json
from pathlib import Path

import pytest

from kvctl.demo.kinds import VOCABULARY
from kvctl.demo.models import EDITION, MARK, prompt
from tests.support.tiny_models import MODELS, write_model

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="writing a model needs `.ci/setup vllm`"
)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_prompts_are_reproducible_and_differ_by_seed() -> None:
    assert prompt(3, 100) == prompt(3, 100)
    assert prompt(3, 100) != prompt(4, 100)
    assert prompt(3, 100) == prompt(3, 200)[:100]
    assert all(4 <= token < VOCABULARY for token in prompt(5, 1000))


def test_a_complete_folder_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / MARK).write_text(json.dumps({"model": "llama", "edition": EDITION}))
    assert write_model("llama", tmp_path) == folder
    assert [path.name for path in folder.iterdir()] == [MARK]


def test_an_unknown_model_is_a_key_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        write_model("no-such-model", tmp_path)


@needs_torch
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # from importing transformers
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_same_every_time_and_small(name: str, tmp_path: Path) -> None:
    first = write_model(name, tmp_path / "first")
    second = write_model(name, tmp_path / "second")
    weights = "model.safetensors"
    assert digest(first / weights) == digest(second / weights)
    assert sum(path.stat().st_size for path in first.iterdir()) < 8 << 20
    config = json.loads((first / "config.json").read_text())
    assert config["dtype"] == MODELS[name].dtype
    assert config["vocab_size"] == VOCABULARY
    assert (first / "tokenizer.json").exists()
