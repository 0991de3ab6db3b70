"""Writes checkpoints as Hugging Face's libraries do, byte for byte under the test's control."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTHS = {"F32": 4, "BF16": 2, "F8_E4M3": 1}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def tensor(seed: int, *shape: int, dtype: str = "BF16") -> Tensor:
    """A tensor of pseudo-random bytes."""
    return Tensor(dtype, shape, random.Random(seed).randbytes(math.prod(shape) * WIDTHS[dtype]))


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write one file, the tensors' bytes in the order of ``tensors``."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, one in tensors.items():
        header[name] = {
            "dtype": one.dtype,
            "shape": one.shape,
            "data_offsets": [end, end := end + len(one.data)],
        }
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(t.data for t in tensors.values()))


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any] | None = None,
    shards: Sequence[Sequence[str]] | None = None,
) -> Path:
    """A folder with a configuration and the tensors, spread over ``shards`` by name and listed in an index."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if shards is None:
        write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
        return folder
    index: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(folder / file, {name: tensors[name] for name in names}, {"format": "pt"})
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder
