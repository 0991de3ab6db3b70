"""Two kvds with a simulated prefiller and a simulated decoder of one worker each: real sockets, real backends."""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvctl.processes.daemons import Kvd, two_hosts
from kvctl.processes.worker_process import WorkerProcess, end_all, good, start_worker

BLOCKS = 48
TOKENS = 640


@dataclass
class Pair:
    """Both hosts and both workers. ``numbers`` name the requests."""

    prefill_host: Kvd
    decode_host: Kvd
    prefill: WorkerProcess
    decode: WorkerProcess
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def offered(self, tokens: int = TOKENS) -> dict[str, Any]:
        """What the prefiller hands over of a request that it has just computed."""
        name, blocks = f"request-{next(self.numbers)}", blocks_of(tokens)
        self.prefill.ask(do="fill", request=name, blocks=blocks)
        return self.prefill.ask(do="offer", request=name, blocks=blocks, tokens=tokens)

    def load(self, offered: dict[str, Any], tokens: int = TOKENS) -> str:
        """Read it. What differs from what was computed, or nothing. Raises `WorkerFailed` where it is a miss."""
        name = f"{offered['prefill']['request_id']}-decode"
        answer = self.decode.ask(do="load", request=name, blocks=blocks_of(tokens), **offered)
        return str(answer["difference"])

    def kill_prefiller(self) -> None:
        """As a crash does."""
        self.prefill.process.send_signal(signal.SIGKILL)
        self.prefill.process.wait()

    def kill_prefill_host(self) -> None:
        """The kvd first, which else would tell of the prefiller's end."""
        self.prefill_host.process.kill()
        self.prefill_host.process.wait()
        self.kill_prefiller()


def blocks_of(tokens: int) -> list[list[int]]:
    """Blocks by group for a request of the simulated model."""
    from kvctl.demo.simulated_model import BLOCK_TOKENS, PERIOD

    numbers = iter(range(1, BLOCKS))
    counts = [1] * (PERIOD - 1) + [-(-tokens // BLOCK_TOKENS)]
    return [[next(numbers) for _ in range(count)] for count in counts]


@contextlib.contextmanager
def simulated_pair(folder: Path, backend: str) -> Iterator[Pair]:
    """Both ready; ended on the way out."""
    workers: list[WorkerProcess] = []
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(two_hosts(folder))
        stack.push(functools.partial(end_all, workers, 5.0))
        workers.extend(_started(host, backend, folder) for host in hosts)
        for worker in workers:
            good(worker.name, worker.answer(60.0))
        prefill, decode = workers
        yield Pair(*hosts, prefill, decode)


def _started(host: Kvd, backend: str, folder: Path) -> WorkerProcess:
    log = folder / f"{host.name}.log"
    worker = start_worker(f"{host.name}-engine", "kvctl.demo.simulated_worker", log, {})
    worker.give(
        {
            "engine_id": f"{host.name}-engine",
            "role": host.name,
            "rank": 0,
            "ranks": 1,
            "blocks": BLOCKS,
            "backend": backend,
            "runtime_dir": str(host.directory),
        }
    )
    return worker
