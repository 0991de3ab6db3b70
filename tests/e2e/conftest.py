"""Real deployments for the end-to-end tests: two kvds, two vLLM engines, one tiny model, kept for a whole module."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvctl.demo.deployment import Deployment, deploy
from kvctl.demo.engine import EngineSpec
from kvctl.demo.models import write_model

DTYPES = {"llama": "float32", "gemma3": "float32", "qwen3.5-gdn": "bfloat16", "deepseek-v2": "bfloat16"}


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    """A random prompt, the same for the same arguments."""
    rng = random.Random(f"{tokens}/{seed}")
    return [rng.randrange(10, 500) for _ in range(tokens)]


@contextmanager
def running(model: str, folder: Path, **both: object) -> Iterator[Deployment]:
    """A deployment of ``model``; further arguments go into both engines' specs."""
    path = write_model(model, folder / "models")
    specs = [
        EngineSpec(
            model=path,
            work_dir=folder / name,
            log_path=folder / f"{name}.log",
            dtype=DTYPES[model],
            max_model_len=2048,
            **both,  # type: ignore[arg-type]
        )
        for name in ("prefill", "decode")
    ]
    with deploy(folder, *specs) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running("llama", tmp_path_factory.mktemp("llama")) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def gdn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running("qwen3.5-gdn", tmp_path_factory.mktemp("gdn")) as deployment:
        yield deployment
