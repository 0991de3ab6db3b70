"""Finds and ends process trees by way of /proc."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

SHARED = "/dev/shm/psm_"  # noqa: S108 - where Linux keeps it, under the prefix of Python's shared_memory
LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()
"""Small kernels (those of virtual machines) are built without it."""


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


def children(pid: int) -> list[int]:
    """The child processes of a process, zombies included; empty when it is gone."""
    if not LISTS_CHILDREN:
        running = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        return [child for child in running if _parent(child) == pid]
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def _parent(pid: int) -> int:
    """Process id of the parent; 0 when the process is gone."""
    try:
        # The name of the program, in parentheses, may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def descendants(pid: int) -> list[int]:
    """All processes below a process, parents before children."""
    found = children(pid)
    for child in found:
        found += children(child)
    return found


def title(pid: int) -> str:
    """The command line of a process as it now reads, or an empty string."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def engine_pids(guardian: int) -> EnginePids:
    """Tell apart the processes below a guardian, by the titles that vLLM gives them."""
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


def shared_memory(pids: list[int]) -> set[Path]:
    """The named shared memory (multiprocessing's, which vLLM's message queues use) that these processes have mapped."""
    found: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            found |= {Path(SHARED + line.partition(SHARED)[2]) for line in lines if SHARED in line}
    # A segment that was unlinked already is listed as "NAME (deleted)", which is no file's name.
    return {path for path in found if path.is_file()}


def kill_children() -> None:
    """Kill every process below this one, wait until none is left, and remove the shared memory they leave behind.

    This process must be a child subreaper: then the children of a killed child become its own, and killing and
    reaping until there are none reaches the whole tree, whatever its members did to escape.
    """
    left_behind = shared_memory(descendants(os.getpid()))
    while True:
        for pid in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    for path in left_behind:
        path.unlink(missing_ok=True)
