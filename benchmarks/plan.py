"""How long it takes from (plan, block ids) to coalesced descriptors, as ratios to what stock vLLM does for the request.

    python benchmarks/plan.py [--layers 80] [--blocks 2048] [--json] [--choice]

The stock side is the installed vLLM's own `_compute_desc_ids`, for both sides, and `make_prepped_xfer` of NIXL, where
stock descriptors are put together. Ours is `compile_request`, with and without NIXL's preparation of what it gives:
from addresses, or from lists that were prepared once, as the NIXL backend does. ``--choice`` times both ways instead,
over lengths of runs, which is what `kvd.topology.copies.LEAST_RUN` rests on.
Rounds of all kinds alternate: seconds are the best of each kind, since the machine may be shared, and ratios the median
of those within a round. Without vLLM or NIXL the stock
columns are left out. A second part plans a decode engine of 64 ranks against a prefill engine of 32.
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvd.geometry.config import CacheOptions, Parallel
from kvd.geometry.model import EngineGeometry, WorkerGeometry
from kvd.topology import copies as request
from kvd.topology.blocks import BlockList
from kvd.topology.compile import compile_plan
from kvd.topology.copies import Copies, compile_request
from kvd.topology.grid import Grid, Selection
from kvd.topology.plan import Plan, plan_worker
from tests.support.samples import engine_from_config

ROUNDS = 30
POOL = 2  # caches are this many times as large as the request

Pattern = Callable[[int, np.random.Generator], np.ndarray[Any, np.dtype[np.int64]]]


def contiguous(blocks: int, _: np.random.Generator) -> np.ndarray[Any, np.dtype[np.int64]]:
    """One run."""
    return np.arange(blocks, dtype=np.int64)


def in_runs(length: int) -> Pattern:
    """Runs of ``length`` blocks in random order; of one block: every block by itself."""

    def made(blocks: int, dice: np.random.Generator) -> np.ndarray[Any, np.dtype[np.int64]]:
        runs = dice.permutation(blocks * POOL // length)[: blocks // length]
        return (runs[:, None] * length + np.arange(length)).ravel().astype(np.int64)

    return made


PATTERNS: dict[str, Pattern] = {
    "contiguous": contiguous,
    "runs of 16": in_runs(16),
    "runs of 8": in_runs(8),
    "runs of 4": in_runs(4),
    "runs of 2": in_runs(2),
    "random": in_runs(1),
}


def engines(layers: int, blocks: int) -> tuple[EngineGeometry, EngineGeometry]:
    """Two equal engines; heads are small, so that NIXL can register real memory of their size."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "hidden_size": 4,
    }
    options = CacheOptions(num_blocks=blocks * POOL, layout="HND")
    one, two = (engine_from_config(config, Parallel(), options, engine_id=name) for name in ("d", "p"))
    return one, two


class Stock:
    """Descriptor lists of both sides prepared in NIXL as NixlConnector does at the handshake, and its request path."""

    def __init__(self, local: WorkerGeometry, remote: WorkerGeometry) -> None:
        """Register memory of the two workers with two agents of this process."""
        from nixl._api import nixl_agent, nixl_agent_config

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
        self.compute = NixlBaseConnectorWorker._compute_desc_ids  # noqa: SLF001
        layers, self.blocks = len(local.groups[0].layers), local.num_blocks
        self.worker = SimpleNamespace(
            _has_mamba=False,
            _transfer_layer_group_ids=[],
            num_regions=layers,
            block_len_per_layer=[0] * layers,
            region_group_ids=[0] * layers,
            _uses_region_group_mapping=False,
        )
        config = nixl_agent_config(backends=["UCX"])
        self.mine, theirs = nixl_agent("plan-local", config), nixl_agent("plan-remote", config)
        self.memory = [np.zeros(w.regions[0].length, np.uint8) for w in (local, remote)]
        addresses = [m.ctypes.data for m in self.memory]
        for agent, memory in zip((self.mine, theirs), self.memory, strict=True):
            agent.register_memory([(memory.ctypes.data, len(memory), 0, "")], "DRAM")
        self.prepared: dict[Grid, list[Any]] = {}
        self.peer = self.mine.add_remote_agent(theirs.get_agent_metadata())
        self.shift = tuple(a - w.regions[0].address for a, w in zip(addresses, (local, remote), strict=True))
        self.handles = [
            self.mine.prep_xfer_dlist(name, self.mine.get_xfer_descs(self._pages(worker, address), "DRAM"))
            for name, worker, address in (
                ("NIXL_INIT_AGENT", local, addresses[0]),
                (self.peer, remote, addresses[1]),
            )
        ]

    @staticmethod
    def _pages(worker: WorkerGeometry, address: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """(address, length, device) of every page of every layer, layer by layer."""
        rows = [
            (address + layer.offset + block * layer.stride, layer.stride, 0)
            for layer in worker.groups[0].layers
            for block in range(worker.num_blocks)
        ]
        return np.array(rows, np.int64)

    def request(self, local: list[int], remote: list[int]) -> None:
        """What NixlConnector does for one request, up to where the transfer is posted."""
        there = self.compute(self.worker, (remote,), self.blocks, None, 1)
        here = self.compute(self.worker, (local,), self.blocks, None, 1)
        made = self.mine.make_prepped_xfer("READ", self.handles[0], here, self.handles[1], there)
        self.mine.release_xfer_handle(made)

    def prepare(self, copies: Copies) -> None:
        """NIXL's preparation of ours, as the NIXL backend has it done."""
        rows = copies.descriptors
        if len(rows):
            lists = []
            for column, shift in zip((rows.local, rows.remote), self.shift, strict=True):
                table = np.empty((len(rows), 3), np.uint64)
                np.add(column, shift, out=table[:, 0], casting="unsafe")
                table[:, 1], table[:, 2] = rows.length, 0
                lists.append(self.mine.get_xfer_descs(table, "DRAM"))
            self.mine.release_xfer_handle(self.mine.initialize_xfer("READ", *lists, self.peer))
        if copies.selection is not None:
            self.pick(copies.selection)

    def pick(self, selection: Selection) -> None:
        """A transfer between lists that are prepared when the grid is seen first."""
        if selection.grid not in self.prepared:
            self.prepared[selection.grid] = [
                self._strided(name, *columns, selection.grid, shift)
                for name, columns, shift in (
                    (
                        "NIXL_INIT_AGENT",
                        (selection.grid.local, selection.grid.local_stride, selection.grid.local_blocks),
                        self.shift[0],
                    ),
                    (
                        self.peer,
                        (selection.grid.remote, selection.grid.remote_stride, selection.grid.remote_blocks),
                        self.shift[1],
                    ),
                )
            ]
        here, there = self.prepared[selection.grid]
        made = self.mine.make_prepped_xfer("READ", here, selection.local, there, selection.remote)
        self.mine.release_xfer_handle(made)

    def _strided(self, name: str, first: Any, stride: Any, blocks: int, grid: Grid, shift: int) -> Any:
        table = np.zeros((len(grid), 5), np.uint64)
        table[:, 0], table[:, 1], table[:, 3], table[:, 4] = first + shift, grid.length, stride, blocks
        return self.mine.prep_xfer_dlist(name, table, "DRAM")


Kinds = dict[str, Callable[[], object]]


def timed(kinds: Kinds) -> dict[str, list[float]]:
    """Seconds of each kind in rounds in which they take turns: two kinds, so that each finds what the other left."""
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(ROUNDS):
        for name, run in kinds.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def ratio(seconds: dict[str, list[float]], one: str, other: str) -> float:
    """How many times as long ``one`` takes as ``other``: the median over rounds."""
    return median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))


def least(seconds: dict[str, list[float]]) -> dict[str, float]:
    """The best of each kind."""
    return {name: min(values) for name, values in seconds.items()}


def compiled(plan: Plan, mine: BlockList, theirs: BlockList, tokens: int) -> Copies:
    """The copies from the one remote rank."""
    return compile_request(plan, {0: mine}, {0: theirs}, tokens=tokens)[0]


def choice(layers: int, blocks: int) -> list[dict[str, Any]]:
    """Both ways for each pattern, whatever `compile_request` would choose."""
    local, remote = engines(layers, blocks)
    plan = plan_worker(local.workers[0], local.workers, remote.workers)
    stock = Stock(local.workers[0], remote.workers[0])
    tokens = blocks * plan.block_sizes[0]
    lines = []
    for name, pattern in PATTERNS.items():
        dice = np.random.default_rng(0)
        mine, theirs = (BlockList(0, pattern(blocks, dice)) for _ in range(2))

        def addresses(mine: BlockList = mine, theirs: BlockList = theirs) -> None:
            stock.prepare(Copies(compile_plan(plan, {0: mine}, {0: theirs}, tokens=tokens)[0]))

        def numbers(mine: BlockList = mine, theirs: BlockList = theirs) -> None:
            with chosen(least_run=sys.maxsize):
                copies = compiled(plan, mine, theirs, tokens)
            stock.prepare(copies)

        seconds = timed({"addresses": addresses, "numbers": numbers})
        lines.append(
            {"pattern": name, "seconds": least(seconds), "ratio": ratio(seconds, "addresses", "numbers")}
        )
    return lines


@contextmanager
def chosen(*, least_run: int) -> Iterator[None]:
    """Within this, picks are made of everything that would leave more than one descriptor in ``least_run`` blocks."""
    before = request.LEAST_RUN, request.FEW
    request.LEAST_RUN, request.FEW = least_run, 0
    try:
        yield
    finally:
        request.LEAST_RUN, request.FEW = before


def requests(layers: int, blocks: int, *, against_stock: bool) -> list[dict[str, Any]]:
    """One line a pattern: descriptors, seconds, ratios and peak memory."""
    local, remote = engines(layers, blocks)
    plan = plan_worker(local.workers[0], local.workers, remote.workers)
    stock = Stock(local.workers[0], remote.workers[0]) if against_stock else None
    lines = []
    for name, pattern in PATTERNS.items():
        dice = np.random.default_rng(0)
        mine, theirs = (BlockList(0, pattern(blocks, dice)) for _ in range(2))
        tokens = blocks * plan.block_sizes[0]
        against: Kinds = {}
        kinds: Kinds = {
            "ours": lambda m=mine, t=theirs, n=tokens: compiled(plan, m, t, n),  # type: ignore[misc]
        }
        if stock is not None:
            ids = mine.ids.tolist(), theirs.ids.tolist()
            kinds["ours_and_nixl"] = lambda m=mine, t=theirs, n=tokens, s=stock: s.prepare(
                compiled(plan, m, t, n)
            )  # type: ignore[misc]
            against["stock"] = lambda i=ids, s=stock: s.request(*i)  # type: ignore[misc]
        pairs = {name: timed({name: run, **against}) for name, run in kinds.items()}
        seconds = {name: values for pair in pairs.values() for name, values in pair.items()}
        copies = compiled(plan, mine, theirs, tokens)
        posted = len(copies.descriptors) + (len(copies.selection) if copies.selection else 0)
        line: dict[str, Any] = {
            "pattern": name,
            "copies": layers * blocks,
            "descriptors": copies.runs,
            "way": "numbers" if copies.selection else "addresses",
            "seconds": least(seconds),
            "bytes_per_descriptor": peak(lambda m=mine, t=theirs, n=tokens: compiled(plan, m, t, n)) / posted,  # type: ignore[misc]
        }
        if stock is not None:
            line["stock_over_ours"] = ratio(pairs["ours"], "stock", "ours")
            line["stock_over_ours_and_nixl"] = ratio(pairs["ours_and_nixl"], "stock", "ours_and_nixl")
        lines.append(line)
    return lines


def peak(run: Callable[[], object]) -> int:
    """Most bytes that were allocated at once."""
    tracemalloc.start()
    run()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def planning() -> list[dict[str, Any]]:
    """Seconds to plan every rank of a pair: 64 ranks read from 32."""
    dense = {
        "model_type": "llama",
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 8192,
    }
    latent = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    lines = []
    for name, config in (("80 layers, 8 heads", dense), ("61 layers, MLA", latent)):
        local = engine_from_config(config, Parallel(tp=64), CacheOptions(layout="HND"), engine_id="d")
        remote = engine_from_config(config, Parallel(tp=32), CacheOptions(layout="HND"), engine_id="p")
        started = time.perf_counter()
        for worker in local.workers:
            plan_worker(worker, local.workers, remote.workers)
        seconds = time.perf_counter() - started
        lines.append({"model": name, "ranks": [64, 32], "seconds": seconds, "seconds_per_rank": seconds / 64})
    return lines


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--blocks", type=int, default=2048)
    parser.add_argument("--no-stock", action="store_true", help="leave vLLM and NIXL out")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--choice", action="store_true", help="time both ways of preparing, over lengths of runs"
    )
    given = parser.parse_args()
    os.environ.setdefault("UCX_MODULES", "^ib")
    if given.choice:
        for line in choice(given.layers, given.blocks):
            times = ", ".join(f"by {kind} {1e3 * s:.2f} ms" for kind, s in line["seconds"].items())
            sys.stdout.write(f"{line['pattern']:11} {times}; ratio {line['ratio']:.2f}\n")
        return 0
    found = {
        "requests": requests(given.layers, given.blocks, against_stock=not given.no_stock),
        "planning": planning(),
    }
    if given.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    for line in found["requests"]:
        times = ", ".join(f"{kind} {1e3 * s:.2f} ms" for kind, s in line["seconds"].items())
        sys.stdout.write(
            f"{line['pattern']:11} {line['copies']} copies in {line['descriptors']} descriptors, by {line['way']}:"
            f" {times}; {line['bytes_per_descriptor']:.0f} bytes a descriptor at the peak"
        )
        if "stock_over_ours" in line:
            sys.stdout.write(
                f"; stock takes {line['stock_over_ours']:.1f} times ours,"
                f" {line['stock_over_ours_and_nixl']:.1f} times ours with NIXL's preparation"
            )
        sys.stdout.write("\n")
    for line in found["planning"]:
        sys.stdout.write(
            f"plan of 64 ranks from 32, {line['model']}: {line['seconds']:.2f} s, "
            f"{1e3 * line['seconds_per_rank']:.0f} ms a rank\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
