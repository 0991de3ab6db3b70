"""Which processes an engine of the demo consists of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvctl.demo.engine import EngineProcess
from kvctl.processes.tree import children, descendants


@dataclass(frozen=True, slots=True)
class EnginePids:
    """The processes of one engine; None or empty for what does not run (yet, or any more).

    Attributes:
        guardian: ends the others when its parent ends.
        host: vLLM's front end.
        core: the scheduler, and the worker too unless `workers` has some.
        workers: one process a rank, with tensor parallelism.
        others: helpers, such as multiprocessing's resource tracker.
    """

    guardian: int
    host: int | None
    core: int | None
    workers: tuple[int, ...]
    others: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        """Every process of the tree, parents before children."""
        named = (self.guardian, self.host, self.core)
        return tuple(pid for pid in named if pid is not None) + self.workers + self.others

    @property
    def executing(self) -> tuple[int, ...]:
        """The processes that hold KV cache memory: the workers, or the core when it is the only one."""
        return self.workers or (() if self.core is None else (self.core,))


def title(pid: int) -> str:
    """The command line of a process as it now reads, or an empty string."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def engine_pids(engine: EngineProcess) -> EnginePids:
    """The processes of an engine that run now, told apart by the titles that vLLM gives them."""
    guardian = engine._process.pid
    host = next(iter(children(guardian)), None)
    core: int | None = None
    workers: list[int] = []
    others: list[int] = []
    for pid in descendants(guardian):
        name = title(pid)
        if pid == host:
            continue
        if name.startswith("VLLM::EngineCore"):
            core = pid
        elif name.startswith("VLLM::Worker"):
            workers.append(pid)
        else:
            others.append(pid)
    return EnginePids(guardian, host, core, tuple(sorted(workers)), tuple(others))
