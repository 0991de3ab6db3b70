"""What happens to the hosts: each fault begins, lasts, and is over when its block ends."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from kvd.wire.handshake import GetPeer
from kvd.wire.identity import Endpoint
from tests.chaos.wire import Weather
from tests.chaos.world import Host, World

CLOCK_DAYS = 15


@dataclass(frozen=True)
class Fault:
    """A fault. Without ``keeps`` it takes the ledger: what was acknowledged before may be gone, nothing later.

    Without ``lasts`` it is over as soon as it has struck. One of the ``ledger`` strikes the host that has one.
    """

    name: str
    strike: Callable[[World, Host, random.Random], AbstractContextManager[None]]
    keeps: bool = True
    lasts: bool = True
    ledger: bool = False


@contextlib.contextmanager
def killed(_world: World, host: Host, dice: random.Random) -> Iterator[None]:
    """SIGKILL, up to five times."""
    for _ in range(dice.randint(0, 4)):
        before = host.kvd.pid
        with contextlib.suppress(ProcessLookupError):
            host.kvd.signal(signal.SIGKILL)
        _started_anew(host, before)
        time.sleep(dice.random())
    with contextlib.suppress(ProcessLookupError):
        host.kvd.signal(signal.SIGKILL)
    yield


@contextlib.contextmanager
def stopped(_world: World, host: Host, _dice: random.Random) -> Iterator[None]:
    """SIGSTOP, later SIGCONT."""
    host.kvd.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        host.kvd.signal(signal.SIGCONT)


def weather(**of: float) -> Callable[[World, Host, random.Random], AbstractContextManager[None]]:
    """The wire loses, delays, reorders, or is cut."""

    @contextlib.contextmanager
    def changed(world: World, _host: Host, dice: random.Random) -> Iterator[None]:
        scaled = {name: value * (0.5 + dice.random() / 2) for name, value in of.items() if name != "cut"}
        world.wire.weather = Weather(cut=bool(of.get("cut")), **scaled)
        try:
            yield
        finally:
            world.wire.weather = Weather()

    return changed


@contextlib.contextmanager
def full_disk(_world: World, host: Host, _dice: random.Random) -> Iterator[None]:
    """No byte is left for the ledger."""
    filling = host.disk / "filling"
    with filling.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    try:
        yield
    finally:
        filling.unlink()


@contextlib.contextmanager
def read_only_disk(_world: World, host: Host, _dice: random.Random) -> Iterator[None]:
    """The disk takes no writes; a remount that is refused while files are open is tried through /proc."""
    done = subprocess.run(["mount", "-o", "remount,ro", host.disk], check=False, capture_output=True)
    if done.returncode:  # the ledger's files are open for writing: nothing new may be made there, at least
        host.disk.chmod(0o500)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", host.disk], check=True)
        host.disk.chmod(0o750)


@contextlib.contextmanager
def locked_ledger(_world: World, host: Host, _dice: random.Random) -> Iterator[None]:
    """Somebody else has the database."""
    with contextlib.closing(sqlite3.connect(_ledger(host), timeout=5.0, isolation_level=None)) as other:
        with contextlib.suppress(sqlite3.Error):
            other.execute("BEGIN EXCLUSIVE")
        yield
        with contextlib.suppress(sqlite3.Error):
            other.execute("ROLLBACK")


@contextlib.contextmanager
def corrupt_ledger(_world: World, host: Host, dice: random.Random) -> Iterator[None]:
    """Pages are overwritten, and kvd is killed where the dice say so."""
    path = _ledger(host)
    with path.open("r+b") as file:
        size = path.stat().st_size
        for _ in range(1 + size // 40_000):
            file.seek(dice.randrange(0, max(1, size - 4096), 4096))
            file.write(dice.randbytes(4096))
    if dice.random() < 0.5:
        host.kvd.signal(signal.SIGKILL)
    yield


@contextlib.contextmanager
def deleted_ledger(_world: World, host: Host, dice: random.Random) -> Iterator[None]:
    """The ledger's files are deleted, or the whole state directory."""
    directory = _ledger(host).parent
    if dice.random() < 0.5:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        for path in directory.glob("ledger.sqlite3*"):
            path.unlink(missing_ok=True)
    yield


@contextlib.contextmanager
def no_runtime_directory(_world: World, host: Host, dice: random.Random) -> Iterator[None]:
    """The runtime directory is removed, or a socket in it; kvd ends when it has noticed."""
    before = host.kvd.pid
    what = dice.choice(["", "kvd.sock", "events.sock"])
    if what:
        (host.kvd.directory / what).unlink(missing_ok=True)
    else:
        shutil.rmtree(host.kvd.directory, ignore_errors=True)
    _started_anew(host, before)
    yield


@contextlib.contextmanager
def clock_jump(_world: World, host: Host, dice: random.Random) -> Iterator[None]:
    """kvd's wall clock is days ahead or behind, and comes back."""
    host.clock.write_text(str(dice.choice([-1, 1]) * CLOCK_DAYS * 86400))
    try:
        yield
    finally:
        host.clock.write_text("0")


@contextlib.contextmanager
def no_descriptors(_world: World, host: Host, _dice: random.Random) -> Iterator[None]:
    """kvd may open three more files, and as many connections as it lets in want one each."""
    pid = host.kvd.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    few = len(list(Path(f"/proc/{pid}/fd").iterdir())) + 3
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (few, limits[1]))
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            with contextlib.suppress(OSError):
                one.connect(str(host.kvd.directory / "kvd.sock"))
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def no_memory(_world: World, host: Host, _dice: random.Random) -> Iterator[None]:
    """kvd may take one MiB more."""
    pid = host.kvd.pid
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (size + (1 << 20), limits[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it ended, and another one runs
            resource.prlimit(pid, resource.RLIMIT_AS, limits)


@contextlib.contextmanager
def dead_dns(world: World, _host: Host, dice: random.Random) -> Iterator[None]:
    """Peers are asked for by names that no server answers for: packets to it get lost."""
    for _ in range(20):
        named = Endpoint(f"h{dice.getrandbits(32):x}.example", 7766)
        world.asker.call(GetPeer(local_engine="d", engine_id="q", endpoint=named), 5.0)
    yield


def _started_anew(host: Host, before: int) -> None:
    ends = time.monotonic() + 10
    while host.kvd.pid == before and time.monotonic() < ends:
        time.sleep(0.02)


def _ledger(host: Host) -> Path:
    return next((host.disk / "ledger").glob("*.sqlite3"))


FAULTS = (
    Fault("killed", killed, lasts=False),
    Fault("stopped", stopped),
    Fault("partition", weather(cut=1)),
    Fault("loss", weather(loss=0.3)),
    Fault("delay", weather(delay=0.2)),
    Fault("reordering", weather(loss=0.02, delay=0.01, jitter=0.1)),
    Fault("full-disk", full_disk, ledger=True),
    Fault("read-only-disk", read_only_disk, ledger=True),
    Fault("locked-ledger", locked_ledger, ledger=True),
    Fault("corrupt-ledger", corrupt_ledger, keeps=False, lasts=False, ledger=True),
    Fault("deleted-ledger", deleted_ledger, keeps=False, lasts=False, ledger=True),
    Fault("no-runtime-directory", no_runtime_directory, lasts=False),
    Fault("clock-jump", clock_jump),
    Fault("no-descriptors", no_descriptors),
    Fault("no-memory", no_memory),
    Fault("dead-dns", dead_dns),
)
