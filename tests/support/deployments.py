"""Real deployments for the end-to-end tests: two kvds, two vLLM engines, one tiny model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvctl.demo.deployment import Deployment, deploy
from kvctl.demo.engine import EngineSpec
from kvctl.demo.models import MODELS, write_model


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    """A random prompt, the same for the same arguments."""
    rng = random.Random(f"{tokens}/{seed}")
    return [rng.randrange(10, 500) for _ in range(tokens)]


@contextmanager
def running(
    model: str, folder: Path, *, extra: Mapping[str, Any] | None = None, **both: Any
) -> Iterator[Deployment]:
    """A deployment of ``model``.

    ``extra`` are connector settings of both engines, further arguments go into both engines' specs.
    """
    path = write_model(model, folder / "models")
    specs = [
        EngineSpec(
            model=path,
            work_dir=folder / name,
            log_path=folder / f"{name}.log",
            dtype=MODELS[model].dtype,
            max_model_len=2048,
            enable_prefix_caching=MODELS[model].prefix_caching,
            forced_first_tokens=name == "decode",
            cache_dir=folder / "cache",
            **both,
        )
        for name in ("prefill", "decode")
    ]
    with deploy(folder, specs[0], specs[1], extra=extra) as deployment:
        yield deployment
