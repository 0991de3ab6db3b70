"""Small engines whose figures can be worked out on paper, made from live tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from kvd.geometry.config import CacheOptions, Parallel, engine_from_shape
from kvd.geometry.families import model_shape
from kvd.geometry.live import (
    BlockAxes,
    Dim,
    LiveTensor,
    attention_layer,
    latent_layer,
)
from kvd.geometry.model import EngineGeometry, Group, GroupKind, Layer, Region, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.geometry.shards import share
from kvd.geometry.states import StateShape, state_layer

NUM_BLOCKS = 32
REGION = 1 << 26

Maker = Callable[[int, int, int], Layer]
"""(ordinal, tp rank, tp size) -> layer; ordinal counts the worker's layers, each of which has a region of its own."""


def regions(count: int) -> tuple[Region, ...]:
    return tuple(Region((1 + i) << 32, REGION) for i in range(count))


def tensor(name: str, ordinal: int, shape: tuple[int, ...], itemsize: int = 2) -> LiveTensor:
    strides = tuple(itemsize * prod(shape[i + 1 :]) for i in range(len(shape)))
    return LiveTensor(name, (1 + ordinal) << 32, shape, strides, "bfloat16", itemsize)


def llama(
    layers: tuple[str, ...], *, heads: int = 8, block: int = 16, layout: str = "HND"
) -> list[tuple[str, Maker]]:
    """Grouped-query attention, head size 128, bfloat16, K and V joined in the last axis."""

    def make(name: str) -> Maker:
        def one(ordinal: int, rank: int, ranks: int) -> Layer:
            part = share("heads", heads, rank, ranks)
            shape = (part.extent, block) if layout == "HND" else (block, part.extent)
            inner: tuple[Dim, Dim] = ("head", "token") if layout == "HND" else ("token", "head")
            return attention_layer(
                tensor(name, ordinal, (NUM_BLOCKS, *shape, 256)),
                regions(ordinal + 1),
                dims=("block", *inner, "key+value"),
                blocks=BlockAxes(NUM_BLOCKS, block),
                heads=part,
                key_size=128,
                value_size=128,
            )

        return one

    return [(name, make(name)) for name in layers]


def latent(layers: tuple[str, ...], *, block: int = 64) -> list[tuple[str, Maker]]:
    """DeepSeek's 512 + 64 latent, bfloat16."""

    def make(name: str) -> Maker:
        return lambda ordinal, _rank, _ranks: latent_layer(
            tensor(name, ordinal, (NUM_BLOCKS, 1, block, 576)),
            regions(ordinal + 1),
            dims=("block", "head", "token", "dim"),
            blocks=BlockAxes(NUM_BLOCKS, block),
            size=576,
        )

    return [(name, make(name)) for name in layers]


def gated_delta_net(layers: tuple[str, ...], *, page: int = 327_680) -> list[tuple[str, Maker]]:
    """On one rank conv (3, 1024) bfloat16 and ssm (4, 128, 128) float32, in a padded page."""

    def make(name: str) -> Maker:
        def one(ordinal: int, rank: int, ranks: int) -> Layer:
            state = StateShape(
                family="gdn",
                conv=((3, 1024 // ranks), "bfloat16", 2),
                ssm=((4 // ranks, 128, 128), "float32", 4),
                heads=4,
            )
            whole = tensor(name, ordinal, (NUM_BLOCKS, page // ranks), 1)
            return state_layer(
                whole, regions(ordinal + 1), state=state, rank=rank, ranks=ranks, block_stride=page // ranks
            )

        return one

    return [(name, make(name)) for name in layers]


GroupParts = tuple[GroupKind, int, int | None, list[tuple[str, Maker]]]
"""Kind, block size, window and layers of a group."""


def engine(
    name: str,
    *groups: GroupParts,
    tp: int = 1,
    stages: tuple[frozenset[str], ...] | None = None,
    **facts: str | int,
) -> EngineGeometry:
    """An engine of ``tp`` ranks; ``stages`` are the layers of each pipeline stage."""
    pp = len(stages) if stages else 1
    workers = []
    for stage in range(pp):
        for rank in range(tp):
            ordinal = 0
            made: list[Group] = []
            for index, (kind, block, window, layers) in enumerate(groups):
                here = [maker for layer, maker in layers if stages is None or layer in stages[stage]]
                made.append(
                    Group(
                        index,
                        kind,
                        block,
                        tuple(make(ordinal + i, rank, tp) for i, make in enumerate(here)),
                        window,
                    )
                )
                ordinal += len(here)
            workers.append(WorkerGeometry(Rank(tp=rank, pp=stage), NUM_BLOCKS, regions(ordinal), tuple(made)))
    return EngineGeometry(name, f"{name}-1", "sample", tp, pp, 1, tuple(workers), dict(facts))


def engine_from_config(
    config: Mapping[str, Any], parallel: Parallel, options: CacheOptions, *, engine_id: str, name: str = ""
) -> EngineGeometry:
    """The engine that serves the model of a Hugging Face ``config.json``."""
    return engine_from_shape(model_shape(config, name), parallel, options, engine_id=engine_id)
