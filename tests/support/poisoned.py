"""A KvdConnector into whose blocks somebody left not-a-numbers, for tests with real engines.

An engine gets it by ``kv_connector_module_path``. Before a load begins each byte that a kernel may read of its blocks
is set to ones, which no number is; before vLLM hears of its end they are looked for. What is found is a line in the
file that the environment names.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.digest import span_of
from benchmarks.gpu.poison import BYTE, leftover
from kvd.geometry.model import WorkerGeometry
from kvd.topology.compile import compile_plan
from kvd.topology.descriptors import concatenate
from kvd.topology.plan import plan_worker
from kvd.worker.cause import text_of
from kvd.worker.load import Load
from kvd.worker.orders import LoadOrder, StepOrders, block_lists
from kvd.worker.worker import WorkerHalf

FILE = "KVCTL_TEST_POISONED"


def environment(file: Path) -> Mapping[str, str]:
    """What an engine needs in its environment; each load is to be a line in ``file``."""
    places = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))
    return {FILE: str(file), "PYTHONPATH": os.pathsep.join(filter(None, places))}


def found(file: Path) -> list[dict[str, Any]]:
    """Of each load by now: ``poisoned`` bytes, and the elements ``within`` and ``beyond`` its tokens that still are."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _poison(geometry: WorkerGeometry, order: LoadOrder) -> int:
    """Every byte of every field of a load's blocks; how many there are."""
    blocks = block_lists(order.groups)
    ends = [(b.first + len(b.ids)) * geometry.groups[g].block_size for g, b in blocks.items()]
    # What a worker would copy of itself is every byte that there is.
    whole = compile_plan(plan_worker(geometry, (geometry,), (geometry,)), blocks, blocks, tokens=max(ends))
    rows = concatenate(list(whole.values()))
    for address, length in zip(rows.local.tolist(), rows.length.tolist(), strict=True):
        ctypes.memset(address, BYTE, length)
    return rows.nbytes


def _bound(half: WorkerHalf, orders: StepOrders) -> None:
    for order in orders.loads:
        _poisoned[order.request_id] = _poison(half.geometry, order)
    _really_bound(half, orders)


def _note(half: WorkerHalf, ended: Iterable[Load]) -> None:
    _really_note(half, _written_down(half, ended))


def _written_down(half: WorkerHalf, ended: Iterable[Load]) -> Iterator[Load]:
    for load in ended:
        order = load.order
        spans = {
            group.index: span_of(group, order.groups[group.index], order.tokens)
            for group in half.geometry.groups
            if group.index in order.groups
        }
        line = {
            "request": order.request_id,
            "cause": text_of(load.cause),
            "poisoned": _poisoned.pop(order.request_id, 0),
            **leftover(half.geometry, order.groups, spans),
        }
        with Path(os.environ[FILE]).open("a") as file:
            file.write(json.dumps(line) + "\n")
        yield load


_poisoned: dict[str, int] = {}

if FILE in os.environ:  # in an engine; a test only looks up the names
    from kvd.vllm.connector import KvdConnector  # noqa: F401 - vLLM looks it up here

    _really_bound, _really_note = WorkerHalf.bound, WorkerHalf._note
    setattr(WorkerHalf, "bound", _bound)  # noqa: B010 - mypy knows methods only as what they were
    setattr(WorkerHalf, "_note", _note)  # noqa: B010
