"""The demo without vLLM: worker processes with KV-shaped memory of their own; kvd, wire and backend are real."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvctl.demo.running import ASKED, DemoOutcome, Running
from kvctl.demo.screen import Board
from kvctl.demo.simulated_model import BLOCK_TOKENS, MODEL, PERIOD
from kvctl.processes.daemons import Kvd, two_hosts
from kvctl.processes.interruption import held, unwinding
from kvctl.processes.worker_process import WorkerProcess, end_all, good, start_worker

PREFILL_RANKS, DECODE_RANKS = 2, 1
BLOCKS = 48
PROMPTS = (600, 1300, 250, 1900, 640, 1000)
"""Lengths of the requests' prompts, in tokens."""
START_SECONDS = 60.0
END_SECONDS = 5.0


@dataclass(slots=True)
class SimulatedEngine:
    """The workers of one engine and its free blocks, in the random order that a busy engine's blocks are in."""

    workers: list[WorkerProcess]
    free: list[int]

    def allocate(self, tokens: int) -> list[list[int]]:
        """Block ids by group for a request: one state for each state group, as many attention blocks as needed."""
        counts = [1] * (PERIOD - 1) + [-(-tokens // BLOCK_TOKENS)]
        return [[self.free.pop() for _ in range(count)] for count in counts]

    def give_back(self, blocks: list[list[int]]) -> None:
        """The blocks of a request that is done; they are used again after all others."""
        self.free[:0] = [block for group in blocks for block in group]


@contextlib.contextmanager
def simulated(backend: str, folder: Path, board: Board) -> Iterator[Running]:
    """Two kvds, two workers that prefill and one that decodes, all ready; ended on the way out.

    Raises `DaemonStartFailed` and `WorkerFailed`.
    """
    with unwinding() as stack:
        board.begin("kvd", "starting two kvds, peers over loopback TCP")
        hosts = stack.enter_context(two_hosts(folder, ASKED))
        board.end("kvd")
        board.begin("workers", f"starting {PREFILL_RANKS} prefilling workers and {DECODE_RANKS} decoding one")
        workers: list[WorkerProcess] = []
        stack.push(functools.partial(end_all, workers, END_SECONDS))
        numbers = random.Random(7)  # noqa: S311 - reproducible on purpose
        engines = []
        for host, ranks in zip(hosts, (PREFILL_RANKS, DECODE_RANKS), strict=True):
            for rank in range(ranks):
                with held():
                    workers.append(_start(host, (rank, ranks), backend, folder))
            engines.append(SimulatedEngine(workers[-ranks:], numbers.sample(range(1, BLOCKS), BLOCKS - 1)))
        prefill, decode = engines
        for worker in workers:
            good(worker.name, worker.answer(START_SECONDS))
        board.end("workers", "registered")
        filling = stack.enter_context(ThreadPoolExecutor(PREFILL_RANKS))

        def serve(number: int) -> DemoOutcome:
            return _serve(number, prefill, decode, filling)

        yield Running(
            prefill_host=hosts[0],
            decode_host=hosts[1],
            model=MODEL,
            mode="pull",
            simulated=True,
            prompts=PROMPTS,
            serve=serve,
        )


def _start(host: Kvd, place: tuple[int, int], backend: str, folder: Path) -> WorkerProcess:
    rank, ranks = place
    log_path = folder / f"{host.name}-{rank}.log"
    name = f"worker tp{rank} of {host.name}-engine"
    worker = start_worker(name, "kvctl.demo.simulated_worker", log_path, {})
    who = {
        "engine_id": f"{host.name}-engine",
        "role": host.name,
        "rank": rank,
        "ranks": ranks,
        "blocks": BLOCKS,
        "backend": backend,
        "runtime_dir": str(host.directory),
    }
    worker.give(who)
    return worker


def _serve(
    number: int, prefill: SimulatedEngine, decode: SimulatedEngine, filling: ThreadPoolExecutor
) -> DemoOutcome:
    """One request: prefill all of its prompt but the last token, hand over, compare."""
    tokens = PROMPTS[number % len(PROMPTS)] - 1
    name = f"request-{number + 1}"
    there, here = prefill.allocate(tokens), decode.allocate(tokens)
    command: dict[str, Any] = {"do": "fill", "request": name, "blocks": there}
    for done in [filling.submit(worker.ask, **command) for worker in prefill.workers]:
        done.result()
    offered = prefill.workers[0].ask(do="offer", request=name, blocks=there, tokens=tokens)
    loaded = decode.workers[0].ask(do="load", request=f"{name}-decode", blocks=here, **offered)
    prefill.give_back(there)
    decode.give_back(here)
    return DemoOutcome(
        name=name,
        prompt_tokens=tokens + 1,
        external_tokens=tokens,
        output_tokens=0,
        handed_over=name,
        equal=not loaded["difference"],
        problem=loaded["difference"],
    )
