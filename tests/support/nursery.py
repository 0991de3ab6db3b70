"""Starts the engines of tests out of one process that has imported vLLM: an import costs 8 s of a core, an engine one.

The process is started with the first engine and ends with this one. For each engine it forks a child that becomes what
`kvctl.processes.spawn.spawn` would have started: same environment, folder and descriptors, a session of its own. It has
one thread and opens nothing but pipes, so a child inherits modules and no more. `tests/e2e/test_engine_host.py` starts
its engines without it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from kvctl.demo.engine import EngineProcess
from kvctl.demo.engine_spec import EngineSpec, environment
from tests.support.daemons import ROOT

LONGEST = 1 << 17
"""Bytes of a request: a command line, its environment and its folder."""
MOST_DESCRIPTORS = 16
HIGH = 512
"""Descriptors from here on are free in the nursery."""


@dataclass
class Fostered:
    """A process that the nursery started, as `subprocess.Popen` shows one of its own."""

    pid: int
    answers: socket.socket
    returncode: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status; that of a kill where the nursery is gone, as nothing of it remains then."""
        if not self.lock.acquire(timeout=-1 if timeout is None else timeout):
            raise subprocess.TimeoutExpired("a fostered process", timeout or 0.0)
        try:
            if self.returncode is None:
                self.answers.settimeout(timeout)
                told = self.answers.recv(64)
                self.returncode = int(told) if told else -signal.SIGKILL
                self.answers.close()
        except TimeoutError:
            raise subprocess.TimeoutExpired("a fostered process", timeout or 0.0) from None
        finally:
            self.lock.release()
        return self.returncode


def start(spec: EngineSpec) -> EngineProcess:
    """Begin to start an engine, as `EngineProcess.start` does."""
    return EngineProcess.start(spec, spawn)


def spawn(command: Sequence[str], log_path: Path, environment: Mapping[str, str], **more: Any) -> Fostered:
    """As `kvctl.processes.spawn.spawn`, of ``python ... -m MODULE ARGUMENT...``."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, log_path.open("ab") as log:
        kept = more.get("pass_fds", ())
        request = {
            "arguments": command[command.index("-m") + 1 :],
            "environment": dict(environment),
            "folder": str(more["cwd"]),
            "descriptors": [1, 2, *kept],
        }
        text = json.dumps(request).encode()
        assert len(text) <= LONGEST
        socket.send_fds(_nursery(), [text], [theirs.fileno(), log.fileno(), log.fileno(), *kept])
    told = ours.recv(64)
    assert told, "the nursery has ended: what it imports is broken"
    return Fostered(int(told), ours)


@functools.cache
def _nursery() -> socket.socket:
    """Where requests go."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    home = Path(tempfile.mkdtemp(prefix="nursery-"))
    spec = EngineSpec(model=home, work_dir=home, log_path=home / "log")
    paths = os.pathsep.join([str(ROOT / "daemon"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    with theirs, spec.log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
            env={**environment(spec, home), "PYTHONPATH": paths},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )

    def end() -> None:
        ours.close()
        process.wait()
        shutil.rmtree(home, ignore_errors=True)

    atexit.register(end)
    return ours


# --- the other side


def main(requests: socket.socket) -> NoReturn:
    """Import what an engine does, then start engines until nobody can ask for any more."""
    _import()
    children: dict[int, tuple[int, socket.socket]] = {}  # by a descriptor of each
    while True:
        for ready in select.select([requests.fileno(), *children], [], [])[0]:
            if ready in children:
                pid, answers = children.pop(ready)
                os.close(ready)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with answers, contextlib.suppress(OSError):
                    answers.send(str(status).encode())
                continue
            text, descriptors, _, _ = socket.recv_fds(requests, LONGEST, MOST_DESCRIPTORS)
            if not text:
                os._exit(0)  # there are only destructors of libraries left to run
            pid = os.fork()
            if pid == 0:
                _become(json.loads(text), descriptors)
            answers = socket.socket(fileno=descriptors[0])
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            with contextlib.suppress(OSError):
                answers.send(str(pid).encode())
            children[os.pidfd_open(pid)] = (pid, answers)


def _import() -> None:
    import setproctitle
    import vllm.entrypoints.cli.main
    import vllm.entrypoints.cli.serve
    import vllm.entrypoints.openai.api_server
    import vllm.envs
    import vllm.model_executor.models.registry as models
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker

    # Whatever it writes into its environment: on CPU vLLM starts fresh interpreters, as kvctl.demo.engine_host says.
    vllm.envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
    # A process that imports vLLM once more finds out what a model's class can do, for CUDA's sake; here is none.
    models._run_in_subprocess = lambda look: look()
    # It looks for the place of the title in the environment that the process began with.
    setproctitle.getproctitle()
    # Children look at these objects no more, and so share their pages.
    gc.collect()
    gc.freeze()


def _become(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Be the process that was asked for."""
    os.setsid()
    moved = [_high(descriptor) for descriptor in descriptors[1:]]
    os.closerange(3, HIGH)
    for descriptor, number in zip(moved, request["descriptors"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [path for path in paths if path not in sys.path]
    for site in [Path(path, "sitecustomize.py") for path in sys.path]:
        if site.exists():
            runpy.run_path(str(site))
    tempfile.tempdir = None  # what it was before this environment
    module, *arguments = request["arguments"]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


def _high(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD, HIGH)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
