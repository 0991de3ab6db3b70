"""Whose time a worker takes for the cost of reads, and when the scheduler hears of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest

from kvd.backends.contract import serving_threads
from kvd.backends.registry import open_backend
from kvd.vllm.memory.tensors import sibling_geometries, worker_geometry
from kvd.worker.orders import StepOrders, StepOutcomes
from kvd.worker.settings import ConnectorSettings
from kvd.worker.worker import WorkerHalf
from tests.support.rigs.bench import Script, cache_config, facts, full, groups_of, place
from tests.support.rigs.pull import BLOCKS, memory

MODULES = {"nixl": "nixl", "mooncake": "mooncake", "auto": "nixl"}


@contextmanager
def worker(kind: str, prefixes: Literal["on", "off"]) -> Iterator[WorkerHalf]:
    config = cache_config(BLOCKS, (full(), ("l0", "l1")))
    groups = groups_of(config)
    _, tensors = memory(2)
    half = WorkerHalf(
        ConnectorSettings(backend=kind, probe=False, prefixes=prefixes),
        facts("d", len(groups)),
        worker_geometry(tensors, config, groups, place()),
        sibling_geometries(tensors, config, groups, place()),
        open_backend(kind, "d", {}),
        Script().open,
        memory=tensors,
    )
    try:
        yield half
    finally:
        half.close()


@pytest.mark.parametrize("kind", MODULES)
def test_those_threads_are_looked_at_that_serve_peers_where_prefixes_are_shared(kind: str) -> None:
    if importlib.util.find_spec(MODULES[kind]) is None:
        pytest.skip(f"{MODULES[kind]} is not installed")
    with worker(kind, "on") as half:
        assert half._read_cost._serving == serving_threads(half._backend) != frozenset()
    with worker(kind, "off") as half:
        assert half._read_cost._serving == frozenset()


class Noting:
    """A `ReadCost` that is asked for, and says 20 ms."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def step(self, _now: float) -> None:
        self.asked.append("step")

    def look(self, _now: float) -> float:
        self.asked.append("look")
        return 0.02


def test_it_is_told_with_the_step_also_where_no_load_ended() -> None:
    with worker("memory", "on") as half:
        noting: Any = Noting()
        half._read_cost = noting
        half.bound(StepOrders())
        half.start(StepOrders())
        half.results()
        assert half.outcomes() == StepOutcomes(read_cost=0.02)
        assert noting.asked == ["step", "look"]
