"""A request's KV by plan and backend, against the raw backend and against the stock NixlConnector's way of moving it.

    python benchmarks/data_path.py [--backend nixl,mooncake,direct] [--tp 1,8] [--tokens 1024] [--rounds 15]
                                   [--blocks contiguous,freed,runs-of-4,random] [--copy-threads 2]
                                   [--beside matrices|python] [--json]

Two processes hold the KV of a Llama-3.1-8B worker (``--tp`` decides how large a page is: 64 KiB, 8 KiB with 8 ranks).
In each round the ways take turns; ratios are the median of those within a round, with the interval that holds the true
median with 95 % certainty whatever its distribution (the sign test's, for rounds that do not depend on each other).

ours    compile the plan for the block ids, submit, poll until done: what the connector does for a request
raw     the same backend and number of bytes in pieces of 16 MiB, descriptors made beforehand, posted by one thread
split   the same, posted as our lanes do: by ``--copy-threads`` threads where the backend copies within the post
one     ours by one thread, where those lanes have several
stock   one descriptor a block and layer. With nixl: the installed vLLM's own `_compute_desc_ids` for both sides and
        NIXL's API over lists prepared once, as NixlConnector does. With mooncake: the same descriptors by our adapter.
        With direct, which stock vLLM does not have: NIXL's as above.

All ways wait with the same pauses. Each but raw and split is checked byte by byte before the rounds begin. ``--beside``
has a thread of the reader at work all the time, which lets go of Python's lock or not. `UCX_TLS=tcp,self` measures NIXL
as it is between hosts without RDMA. Memory is a memfd with direct, as KvdConnector makes it.
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, cycle, islice, permutations
from math import comb
from multiprocessing.connection import Connection
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvctl.bench.cases import MovedRequest, blocks_needed, requests
from kvctl.bench.memory import Memory, anonymous, place, with_blocks
from kvctl.bench.moving import pause, uncoalesced
from kvctl.bench.pattern import clear, fill, first_difference
from kvctl.commands.measuring.benchmark import FRAGMENTATIONS
from kvctl.engines.sources import planned
from kvd.backends.contract import Backend, Lane, State, Transfer, takes_selections, traits_of
from kvd.backends.direct.memfd import memfd
from kvd.backends.nixl.library import load
from kvd.backends.registry import open_backend
from kvd.geometry.model import WorkerGeometry
from kvd.topology.compile import compile_plan
from kvd.topology.copies import Copies, compile_request
from kvd.topology.descriptors import Descriptors
from kvd.topology.plan import Plan, plan_worker

PIECE = 16 << 20
SERVE = 200e-6
CERTAINTY = 0.95

Way = Callable[[], object]


@dataclass(frozen=True)
class Kind:
    """Of a backend: whether NixlConnector's way is its peer and its lanes split reads; where its memory comes from."""

    stock: bool
    splits: bool
    allocate: Callable[[int], mmap.mmap] = anonymous


KINDS = {
    "nixl": Kind(stock=True, splits=True),
    "mooncake": Kind(stock=False, splits=False),
    "direct": Kind(stock=True, splits=True, allocate=partial(memfd, "data-path")),
}


@dataclass(frozen=True)
class Offer:
    """What the source process tells: its worker, what a lane needs, what a stock agent needs."""

    worker: WorkerGeometry
    metadata: bytes
    agent: bytes


def serve(kind: str, worker: WorkerGeometry, pipe: Connection) -> None:
    """The source process: fills the blocks of each request that it is sent, until it is sent None."""
    os.dup2(2, 1)  # NIXL's log is not our answer
    memory = place(worker, KINDS[kind].allocate)
    backend = open_backend(kind, "source", {})
    backend.register(memory.geometry.regions)
    agent, ended = stock_agent("stock-source", memory) if KINDS[kind].stock else None, threading.Event()
    if agent is not None:
        threading.Thread(target=progress, args=(agent, ended), daemon=True).start()
    pipe.send(Offer(memory.geometry, backend.metadata(), agent.get_agent_metadata() if agent else b""))
    while (request := pipe.recv()) is not None:
        fill(memory, request.source, request.name)
        pipe.send(True)
    ended.set()
    backend.close()
    os._exit(0)


def progress(agent: Any, ended: threading.Event) -> None:
    """Answer the stock reader's requests every `SERVE` seconds; our backends wait for theirs in NIXL's own thread."""
    while not ended.wait(SERVE):
        agent.get_new_notifs()


def stock_agent(name: str, memory: Memory) -> Any:
    """An agent over the memory that times its transfers, as NixlConnector's. Its own thread would take a whole core."""
    load()  # or NIXL's log goes to stdout
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(
        name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"], capture_telemetry=True)
    )
    agent.register_memory([(r.address, r.length, 0, "") for r in memory.geometry.regions], "DRAM")
    return agent


class Stock:
    """NixlConnector's way of a request, over descriptor lists that were prepared at the handshake."""

    def __init__(self, memory: Memory, offer: Offer) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
        self.compute = NixlBaseConnectorWorker._compute_desc_ids  # noqa: SLF001
        local, remote = memory.geometry, offer.worker
        layers = len(local.groups[0].layers)
        self.worker = SimpleNamespace(
            _has_mamba=False,
            _transfer_layer_group_ids=[],
            num_regions=layers,
            block_len_per_layer=[0] * layers,
            region_group_ids=[0] * layers,
            _uses_region_group_mapping=False,
        )
        self.blocks = local.num_blocks, remote.num_blocks
        self.agent = stock_agent("stock-reader", memory)
        self.peer = self.agent.add_remote_agent(offer.agent)
        self.lists = [
            self.agent.prep_xfer_dlist(name, self.agent.get_xfer_descs(pages(worker), "DRAM"))
            for name, worker in (("NIXL_INIT_AGENT", local), (self.peer, remote))
        ]

    def move(self, request: MovedRequest) -> None:
        """Descriptor numbers of both sides, a transfer over the prepared lists, wait, take NIXL's times of it."""
        here = self.compute(self.worker, (request.reader[0].ids.tolist(),), self.blocks[0], None, 1)
        there = self.compute(self.worker, (request.source[0].ids.tolist(),), self.blocks[1], None, 1)
        handle = self.agent.make_prepped_xfer("READ", self.lists[0], here, self.lists[1], there)
        self.agent.transfer(handle)
        posted = time.monotonic()
        while (state := self.agent.check_xfer_state(handle)) == "PROC":
            pause(posted)
        if state != "DONE":
            raise SystemExit(f"NIXL's transfer ended as {state}")
        self.agent.get_xfer_telemetry(handle)
        self.agent.release_xfer_handle(handle)


def pages(worker: WorkerGeometry) -> Any:
    """(address, length, device) of every page of every layer, layer by layer."""
    rows = [
        (worker.page_address(layer, block), layer.page.content, 0)
        for layer in worker.groups[0].layers
        for block in range(worker.num_blocks)
    ]
    return np.array(rows, np.int64)


def by_plan(lane: Lane, plan: Plan, request: MovedRequest, *, selection: bool) -> Copies:
    """Plan the request, submit it and poll until done."""
    if selection:
        copies = compile_request(plan, request.reader, request.source, tokens=request.tokens)[0]
    else:
        copies = Copies(compile_plan(plan, request.reader, request.source, tokens=request.tokens)[0])
    if copies.selection is not None and takes_selections(lane):
        finish(lane, lane.submit_selection("tp0", copies.selection))
    if len(copies.descriptors):
        wait(lane, copies.descriptors)
    return copies


def wait(lane: Lane, rows: Descriptors) -> None:
    """Submit and poll until done."""
    finish(lane, lane.submit("tp0", rows))


def finish(lane: Lane, transfer: Transfer) -> None:
    """Poll until done."""
    while lane.poll(transfer) is State.PENDING:
        pause(transfer.posted)
    if transfer.state is State.FAILED:
        raise SystemExit(f"transfer failed: {transfer.reason}")


@contextmanager
def source(kind: str, worker: WorkerGeometry) -> Iterator[tuple[Connection, Offer]]:
    """The other process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(kind, worker, theirs))
    process.start()
    theirs.close()  # or its death would not be seen here
    try:
        yield ours, ours.recv()
        ours.send(None)
        process.join(10)
    finally:
        process.kill()
        process.join()


def lane_to(offer: Offer, backend: Backend) -> Lane:
    """A lane to the source."""
    lane = backend.lane("reader")
    lane.add("tp0", offer.metadata)
    return lane


def settle(lane: Lane, offer: Offer, rows: Descriptors) -> None:
    """Read until the lane is connected and has opened what it splits reads with."""
    for _ in range(4):
        wait(lane, rows)
        lane.add("tp0", offer.metadata)  # waits for what is being opened


@contextmanager
def beside(what: str) -> Iterator[None]:
    """A thread that multiplies ``matrices``, with Python's lock let go of, or one in ``python`` that never waits."""
    ended, table = threading.Event(), np.ones((700, 700))
    works: dict[str, Callable[[], object]] = {"matrices": lambda: table @ table, "python": lambda: None}

    def work() -> None:
        while not ended.is_set():
            works[what]()

    if what in works:
        threading.Thread(target=work, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def measure(kind: str, tp: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    """One line for each pattern of blocks."""
    tokens = given.tokens
    engine = planned("llama-3.1-8b", f"tp={tp},layout=HND,num_blocks=100000")
    worker = engine.workers[0]
    blocks = 2 * blocks_needed(worker, tokens)
    size = tokens // 16 * sum(layer.page.content for layer in worker.groups[0].layers)
    cut = with_blocks(worker, blocks)
    memory = place(cut, KINDS[kind].allocate)
    options = [{"copy_threads": number} if KINDS[kind].splits else {} for number in (given.copy_threads, 1)]
    backends = [open_backend(kind, f"reader{number}", option) for number, option in enumerate(options)]
    for backend in backends:
        backend.register(memory.geometry.regions)
    lines = []
    with source(kind, cut) as (pipe, offer):
        plan = plan_worker(memory.geometry, [memory.geometry], [offer.worker])
        lane, plain = (lane_to(offer, backend) for backend in backends)
        selection = traits_of(backends[0], lane).strided_lists  # as the connector decides
        stock = Stock(memory, offer) if KINDS[kind].stock else None
        offsets = np.arange(0, size, PIECE, dtype=np.int64)
        there = Descriptors(
            offsets + memory.geometry.regions[0].address,
            offsets + offer.worker.regions[0].address,
            np.minimum(PIECE, size - offsets),
        )
        for each in (lane, plain):
            settle(each, offer, there)
        for pattern in given.blocks.split(","):
            [request] = requests(memory.geometry, offer.worker, tokens, 1, pattern)

            def by_stock(request: MovedRequest = request) -> None:
                if stock is not None:
                    stock.move(request)
                else:
                    wait(lane, uncoalesced(plan, request)[0].descriptors)

            ours = partial(by_plan, lane, plan, request, selection=selection)
            ways: dict[str, Way] = {
                "ours": ours,
                "raw": partial(wait, plain, there),
                "split": partial(wait, lane, there),
                "stock": by_stock,
            }
            if KINDS[kind].splits:
                ways["one"] = partial(by_plan, plain, plan, request, selection=selection)
            pipe.send(request)
            pipe.recv()
            for name in ways.keys() - {"raw", "split"}:
                clear(memory, request.reader)
                ways[name]()
                if difference := first_difference(memory, request.reader, request.name, tokens):
                    raise SystemExit(f"{kind}, {name}: {difference}")
            with beside(given.beside):
                seconds = timed(ways, given.rounds)
            lines.append(
                {
                    "backend": kind,
                    "page_bytes": worker.groups[0].layers[0].page.content,
                    "blocks": pattern,
                    "bytes": size,
                    "descriptors": ours().runs,
                    "stock_descriptors": tokens // 16 * len(worker.groups[0].layers),
                    "bytes_per_s": {name: size / median(values) for name, values in seconds.items()},
                    "ours_over": {
                        name: ratio(seconds[name], seconds["ours"]) for name in ways if name != "ours"
                    },
                }
            )
    for backend in backends:
        backend.close()
    return lines


def timed(ways: Mapping[str, Way], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, in rounds of random order, since each finds what the one before left in the caches.

    No order comes again before all have been, so in as many rounds as there are orders each way follows each other one
    equally often.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    orders = np.random.default_rng(0).permutation(list(permutations(ways))).tolist()
    for order in islice(cycle(orders), rounds):
        for name in order:
            started = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def ratio(theirs: list[float], ours: list[float]) -> dict[str, float]:
    """How many times as fast ours is: the median over the rounds, and the ends of its interval."""
    found = sorted(a / b for a, b in zip(theirs, ours, strict=True))
    out = outside(len(found))
    return {"median": median(found), "low": found[out], "high": found[-1 - out]}


def outside(rounds: int) -> int:
    """How many of the least values, and of the greatest, the interval of the median leaves out.

    Each round falls below the true median with chance 1/2, so the interval misses it only where at most this many do,
    or at most this many do not: the binomial distribution says how likely that is. 0 where even all rounds are too few.
    """
    chances = accumulate(comb(rounds, below) / 2**rounds for below in range(rounds // 2))
    return max(0, sum(bool(chance <= (1 - CERTAINTY) / 2) for chance in chances) - 1)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="nixl,mooncake,direct")
    parser.add_argument("--tp", default="1,8")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks", default=",".join(FRAGMENTATIONS))
    parser.add_argument("--copy-threads", type=int, default=2)
    parser.add_argument("--beside", choices=("matrices", "python"), default="")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    lines = [
        line
        for backend in given.backend.split(",")
        for tp in given.tp.split(",")
        for line in measure(backend, int(tp), given)
    ]
    if given.json:
        sys.stdout.write(json.dumps({"load": os.getloadavg()[0], "lines": lines}) + "\n")
        return
    for line in lines:
        rates = ", ".join(f"{name} {value / 1e9:.2f}" for name, value in line["bytes_per_s"].items())
        sys.stdout.write(
            f"{line['backend']:9} page {line['page_bytes'] >> 10:3} KiB {line['blocks']:11}"
            f" {line['descriptors']:6} of {line['stock_descriptors']} descriptors; GB/s: {rates};"
            f" ours is {', '.join(f'{told(found)} of {name}' for name, found in line['ours_over'].items())}\n"
        )


def told(found: dict[str, float]) -> str:
    """A ratio with its interval."""
    return f"{found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


if __name__ == "__main__":
    main()
