"""The demo without vLLM: worker processes with KV-shaped memory of their own; kvd, wire and backend are real."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import select
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvctl.demo import tied
from kvctl.demo.deployment import Kvd, two_hosts
from kvctl.demo.errors import WorkerFailed
from kvctl.demo.interruption import held, unwinding
from kvctl.demo.running import Running, Served
from kvctl.demo.screen import Board
from kvctl.demo.simulated_cache import BLOCK_TOKENS, MODEL, PERIOD

PREFILL_RANKS, DECODE_RANKS = 2, 1
BLOCKS = 48
PROMPTS = (600, 1300, 250, 1900, 640, 1000)
"""Lengths of the requests' prompts, in tokens."""
START_SECONDS, ANSWER_SECONDS = 60.0, 60.0
END_SECONDS = 5.0
LOG_LINES_IN_ERRORS = 15


@dataclass(slots=True)
class WorkerProcess:
    """A worker and the pipes to it. `ask` may be called from any thread; orders are obeyed one after the other."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    lock: threading.Lock = field(default_factory=threading.Lock)
    unread: bytes = b""

    def ask(self, **orders: Any) -> dict[str, Any]:
        """Give an order and wait for its answer. Raises `WorkerFailed`."""
        with self.lock:
            self.give(orders)
            answer = self.answer(ANSWER_SECONDS)
        if "error" in answer:
            raise WorkerFailed(f"{self.name}: {answer['error']}")
        return answer

    def answer(self, timeout: float) -> dict[str, Any]:
        """The next answer, at most ``timeout`` seconds from now. Raises `WorkerFailed`."""
        out, until = self.process.stdout, time.monotonic() + timeout
        assert out is not None  # noqa: S101 - it was opened as a pipe
        while b"\n" not in self.unread:
            left = max(0.0, until - time.monotonic())
            if not select.select([out], [], [], left)[0]:
                raise WorkerFailed(f"{self.name} did not answer within {timeout:g} s{self._log()}")
            more = os.read(out.fileno(), 1 << 16)
            if not more:
                raise WorkerFailed(f"{self.name} ended with status {self.process.wait()}{self._log()}")
            self.unread += more
        line, _, self.unread = self.unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def dismiss(self) -> None:
        """No more orders: it ends once it has seen that."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def end(self, timeout: float) -> None:
        """Wait for its end at most ``timeout`` seconds, then end it by force."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def give(self, orders: dict[str, Any]) -> None:
        """Write an order; `answer` has its answer. Raises `WorkerFailed`."""
        pipe = self.process.stdin
        assert pipe is not None  # noqa: S101 - it was opened as a pipe
        try:
            pipe.write(json.dumps(orders).encode() + b"\n")
            pipe.flush()
        except (OSError, ValueError):
            raise WorkerFailed(f"{self.name} takes no orders any more{self._log()}") from None

    def _log(self) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(["; the end of its log:", *(f"  {line}" for line in lines[-LOG_LINES_IN_ERRORS:])])


@dataclass(slots=True)
class Engine:
    """The workers of one engine and its free blocks, in the random order that a busy engine's blocks are in."""

    workers: list[WorkerProcess]
    free: list[int]

    def allocate(self, tokens: int) -> list[list[int]]:
        """Block ids by group for a request: one state for each state group, as many attention blocks as needed."""
        counts = [1] * (PERIOD - 1) + [-(-tokens // BLOCK_TOKENS)]
        return [[self.free.pop() for _ in range(count)] for count in counts]


@contextlib.contextmanager
def simulated(backend: str, folder: Path, board: Board) -> Iterator[Running]:
    """Two kvds, two workers that prefill and one that decodes, all ready; ended on the way out.

    Raises `DaemonStartFailed` and `WorkerFailed`.
    """
    with unwinding() as stack:
        board.begin("kvd", "starting two kvds, peers over loopback TCP")
        hosts = stack.enter_context(two_hosts(folder))
        board.end("kvd")
        board.begin("workers", f"starting {PREFILL_RANKS} prefilling workers and {DECODE_RANKS} decoding one")
        workers: list[WorkerProcess] = []
        stack.push(functools.partial(_end, workers))
        numbers = random.Random(7)  # noqa: S311 - reproducible on purpose
        engines = []
        for host, ranks in zip(hosts, (PREFILL_RANKS, DECODE_RANKS), strict=True):
            for rank in range(ranks):
                with held():
                    workers.append(_start(host, (rank, ranks), backend, folder))
            engines.append(Engine(workers[-ranks:], numbers.sample(range(1, BLOCKS), BLOCKS - 1)))
        prefill, decode = engines
        for worker in workers:
            worker.answer(START_SECONDS)
        board.end("workers", "registered")
        filling = stack.enter_context(ThreadPoolExecutor(PREFILL_RANKS))

        def serve(number: int) -> Served:
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


def _end(workers: list[WorkerProcess], kind: type[BaseException] | None, *_: object) -> None:
    """End all workers: in order, or at once after an exception. What they hold is memory, which needs no farewell."""
    for worker in workers:
        worker.dismiss()
    for worker in workers:
        worker.end(END_SECONDS if kind is None else 0.0)


def _start(host: Kvd, place: tuple[int, int], backend: str, folder: Path) -> WorkerProcess:
    rank, ranks = place
    log_path = folder / f"{host.name}-{rank}.log"
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            tied.command("kvctl.demo.simulated_worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=folder,
            env=dict(os.environ) | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    worker = WorkerProcess(f"worker tp{rank} of {host.name}-engine", process, log_path)
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


def _serve(number: int, prefill: Engine, decode: Engine, filling: ThreadPoolExecutor) -> Served:
    """One request: prefill all of its prompt but the last token, hand over, compare."""
    tokens = PROMPTS[number] - 1
    name = f"request-{number + 1}"
    there = prefill.allocate(tokens)
    orders = {"do": "fill", "request": name, "blocks": there}
    for done in [filling.submit(worker.ask, **orders) for worker in prefill.workers]:
        done.result()
    source = prefill.workers[0].ask(do="offer", request=name, blocks=there, tokens=tokens)
    here = decode.allocate(tokens)
    loaded = decode.workers[0].ask(do="load", request=f"{name}-decode", blocks=here, source=source)
    return Served(
        name=name,
        prompt_tokens=PROMPTS[number],
        external_tokens=tokens,
        output_tokens=0,
        handed_over=name,
        equal=not loaded["difference"],
        problem=loaded["difference"],
    )
