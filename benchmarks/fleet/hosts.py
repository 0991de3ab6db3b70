"""Many kvds on this machine: each a process with an address of loopback, a folder and a peer socket of its own.

They are forked from this process, which has imported kvd: a start takes a tenth of a second of processor time less, and
they share memory that nobody writes to. So fork them before this process has a second thread.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeVar

from benchmarks.fleet import slow_clock
from kvctl.processes.tied import PR_SET_PDEATHSIG, prctl
from kvd.client.errors import ClientError
from kvd.client.operator import connect
from kvd.wire.frame import Message
from kvd.wire.identity import Endpoint
from kvd.wire.query import GetStatus, KvdStatus

PORT = 7766
MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of this process's own is made in it
ASKED_AT_A_TIME = 16
AT_A_TIME = 8
"""Hosts that start at a time."""
ASK_SECONDS, START_ASK_SECONDS = 900.0, 20.0
MOST_DESCRIPTORS = 1 << 20
START_SECONDS = 600.0
"""By the clock on the wall, as all times of this file: another machine may be busy with much else."""

Answer = TypeVar("Answer", bound=Message)


@dataclass
class Host:
    """One kvd; ``pid`` is that of its process."""

    number: int
    directory: Path
    endpoint: Endpoint
    pid: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)

    def ask(self, question: Message, answer: type[Answer], seconds: float = ASK_SECONDS) -> Answer:
        """One question over its local socket. Raises `ClientError`."""
        with connect(self.directory, seconds) as operator:
            got = operator.ask(question)
        if not isinstance(got, answer):
            raise SystemExit(f"host {self.number} answered {got}")
        return got

    def status(self) -> KvdStatus:
        """How it is."""
        return self.ask(GetStatus(), KvdStatus)

    def signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    @property
    def log(self) -> str:
        """What it wrote."""
        return (self.directory / "kvd.log").read_text(errors="replace")


def address(number: int, network: int = 77) -> str:
    """The address of a host: all of 127.0.0.0/8 is this machine."""
    return f"127.{network}.{number // 250}.{number % 250 + 1}"


@contextlib.contextmanager
def fleet(
    count: int,
    settings: Callable[[int, Sequence[Endpoint]], Mapping[str, str]],
    network: int = 77,
) -> Iterator[list[Host]]:
    """Kvds that serve; ``settings`` gives the variables of each by its number and the places of all. Killed at the end.

    Raises `SystemExit` where one does not start.
    """
    from kvd.service import main as kvd  # what all share
    from kvd.service.peers.comparer import pool  # noqa: F401

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.collect()
    gc.freeze()
    places = [Endpoint(address(number, network), PORT) for number in range(count)]
    with folder() as place:
        hosts = [Host(n, place / str(n), at, settings=settings(n, places)) for n, at in enumerate(places)]
        try:
            starting: list[Host] = []
            for host in hosts:
                starting.append(host)
                _start(host, kvd.run)
                if len(starting) == AT_A_TIME:
                    _hold(starting.pop(0))
            for host in starting:
                _hold(host)
            for host in hosts:
                host.signal(signal.SIGCONT)
            yield hosts
        finally:
            started = [host for host in hosts if host.pid]
            for host in started:
                host.signal(signal.SIGKILL)
            for host in started:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(host.pid, 0)
            gc.unfreeze()


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder for files of kvds, in memory where that is possible: hundreds of ledgers would wait for one disk."""
    with tempfile.TemporaryDirectory(prefix="fl-", dir=MEMORY if MEMORY.is_dir() else None) as place:
        yield Path(place)


def statuses(hosts: Sequence[Host]) -> list[KvdStatus]:
    """How they all are, some asked at a time."""
    with ThreadPoolExecutor(ASKED_AT_A_TIME) as threads:
        return list(threads.map(Host.status, hosts))


def _hold(host: Host) -> None:
    """Wait until it serves, and stop it until all do: those that are there would look for the others meanwhile."""
    wait_ready(host)
    host.signal(signal.SIGSTOP)


def wait_ready(host: Host) -> None:
    """Wait until it answers, and has imported what comparing takes. Raises `SystemExit` with its log."""
    until = slow_clock.wall() + START_SECONDS
    while True:
        with contextlib.suppress(ClientError):
            if host.ask(GetStatus(), KvdStatus, START_ASK_SECONDS).gauges["handshakes.prepared"]:
                return
        ended, _ = os.waitpid(host.pid, os.WNOHANG)
        if ended or slow_clock.wall() > until:
            raise SystemExit(f"kvd {host.number} did not come up:\n{host.log}")
        slow_clock.pause(0.1)


def _start(host: Host, run: Callable[[Sequence[str]], NoReturn]) -> None:
    host.directory.mkdir(mode=0o750)
    parent = os.getpid()
    host.pid = os.fork()
    if host.pid:
        return
    status = 1
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        log = os.open(host.directory / "kvd.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor, onto in ((null, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, onto)
        os.closerange(3, MOST_DESCRIPTORS)
        for name in [name for name in os.environ if name.startswith("KVD_")]:
            del os.environ[name]
        os.environ.update(host.settings)
        place = str(host.directory)
        gc.unfreeze()
        run(["--runtime-dir", place, "--state-dir", f"{place}/state", "--listen", str(host.endpoint)])
    except SystemExit as end:
        status = int(end.code or 0) if not isinstance(end.code, str) else 2
    finally:
        sys.stderr.flush()
        os._exit(status)
