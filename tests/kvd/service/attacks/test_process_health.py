"""What kvd relies on is taken from it while it runs: it serves, or it ends and says why. It never only looks alive."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd.client.errors import ClientError
from kvd.wire.query import GetStatus
from tests.support.daemons import ROOT, Daemon, daemons, facts, session, wait_for, worker

NOTICED_SECONDS = 10.0
"""It looks each second; the rest is for a busy machine."""


def ended(kvd: Daemon, why: str) -> None:
    """kvd ends by itself with status 1, and its last lines say why."""
    assert kvd.process is not None
    assert kvd.process.wait(NOTICED_SECONDS) == 1, kvd.log
    assert "CRITICAL" in kvd.log
    assert why in kvd.log


def remove_directory(kvd: Daemon) -> None:
    shutil.rmtree(kvd.directory)


def replace_directory(kvd: Daemon) -> None:
    kvd.directory.rename(kvd.directory.with_suffix(".old"))
    kvd.directory.mkdir(mode=0o750)


def remove_socket(kvd: Daemon) -> None:
    (kvd.directory / "kvd.sock").unlink()


def remove_events(kvd: Daemon) -> None:
    (kvd.directory / "events.sock").unlink()


def take_socket(kvd: Daemon) -> None:
    remove_socket(kvd)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(kvd.directory / "kvd.sock"))


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        (remove_directory, "cannot be found any more"),
        (replace_directory, "another directory stands in its place"),
        (remove_socket, "kvd.sock cannot be found any more"),
        (remove_events, "events.sock cannot be found any more"),
        (take_socket, "kvd.sock is not the socket that this kvd bound"),
    ],
)
def test_a_kvd_that_new_clients_cannot_find_ends_and_the_next_one_has_its_sessions(
    attack: Callable[[Daemon], None], why: str, tmp_path: Path
) -> None:
    with daemons(1, "--state-dir", str(tmp_path)) as (kvd,), session(kvd, worker(facts("e"))) as one:
        before = one.state.registrations
        attack(kvd)
        ended(kvd, why)
        kvd.start()
        one.wait(lambda state: state.connected and state.registrations > before, NOTICED_SECONDS)
        assert [row.engine_id for row in kvd.workers()] == ["e"]


def test_there_is_one_kvd_for_a_directory_also_when_its_lock_file_is_gone() -> None:
    with daemons() as (kvd,):
        (kvd.directory / "kvd.lock").unlink()
        second = Daemon(kvd.directory).start(wait=False)
        assert second.process is not None
        assert second.process.wait(20) == 2
        assert f"another kvd (process {kvd.pid}) serves {kvd.directory}" in kvd.log
        assert kvd.status().kvd_id


@contextlib.contextmanager
def patched(folder: Path, patch: str, **environment: str) -> Iterator[Daemon]:
    """A kvd that does as told before it begins; ``patch`` finds the folder as ``FOLDER``."""
    (folder / "sitecustomize.py").write_text(
        f"from pathlib import Path\nFOLDER = Path({str(folder)!r})\n{patch}"
    )
    paths = os.pathsep.join([str(folder), str(ROOT / "daemon"), str(ROOT)])
    with tempfile.TemporaryDirectory(prefix="kvd-") as place:
        kvd = Daemon(Path(place) / "d", environment={"PYTHONPATH": paths, **environment})
        try:
            yield kvd.start()
        finally:
            kvd.kill()


MUTE = """
from kvd.service import self_check
from kvd.service.handlers import registration
self_check.ASK_SECONDS = 0.2
known = registration.heartbeat
def heartbeat(daemon, caller, message):
    if (FOLDER / "memory").exists():
        raise MemoryError
    while (FOLDER / "stuck").exists():
        pass
    return None if (FOLDER / "mute").exists() else known(daemon, caller, message)
registration.heartbeat = heartbeat
"""


@contextlib.contextmanager
def bound(manager: socket.socket, address: str) -> Iterator[None]:
    manager.bind(address)
    manager.settimeout(20)
    yield


@pytest.mark.parametrize("fault", ["mute", "stuck", "memory"])
def test_a_kvd_that_answers_nobody_feeds_no_watchdog_and_ends(tmp_path: Path, fault: str) -> None:
    address = str(tmp_path / "notify")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
        bound(manager, address),
        patched(tmp_path, MUTE, NOTIFY_SOCKET=address, WATCHDOG_USEC="600000") as kvd,
    ):
        while manager.recv(4096) != b"WATCHDOG=1":
            pass
        (tmp_path / fault).touch()
        ended(kvd, "it serves nobody")
        manager.settimeout(0)
        fed = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                fed += manager.recv(4096) == b"WATCHDOG=1"
        assert fed <= 1  # a round trip that was over before the fault began


BREAK_LOG = """
from kvd.service import log
written = log._write_all
def write(descriptor, text):
    if (FOLDER / "broken").exists():
        raise RuntimeError("no log")
    written(descriptor, text)
log._write_all = write
"""


def test_a_thread_that_ends_ends_kvd(tmp_path: Path) -> None:
    with patched(tmp_path, BREAK_LOG) as kvd:
        (tmp_path / "broken").touch()
        kvd.signal(signal.SIGHUP)  # which logs a line
        assert kvd.process is not None
        assert kvd.process.wait(NOTICED_SECONDS) == 1


def vm_size(kvd: Daemon) -> int:
    [line] = [
        line
        for line in Path(f"/proc/{kvd.pid}/status").read_text().splitlines()
        if line.startswith("VmSize:")
    ]
    return int(line.split()[1]) << 10


def served(kvd: Daemon) -> bool:
    try:
        kvd.ask(GetStatus(), 1.0)
    except ClientError:
        return False
    return True


def test_without_memory_it_answers_or_ends() -> None:
    with daemons() as (kvd,):
        assert kvd.process is not None
        process = kvd.process
        limit = vm_size(kvd) + (2 << 20)
        resource.prlimit(kvd.pid, resource.RLIMIT_AS, (limit, limit))
        with contextlib.suppress(ClientError):
            kvd.ask(worker(facts("e", note="x" * (8 << 20))), 5.0)
        wait_for(lambda: served(kvd) or process.poll() is not None, 45.0)
        assert process.poll() in {None, 1}, kvd.log


def test_with_400_mib_of_address_space_from_its_start_it_serves_or_ends(tmp_path: Path) -> None:
    limited = ("prlimit", f"--as={400 << 20}", "--")
    kvd = Daemon(tmp_path / "d", ("--state-dir", str(tmp_path)), by=limited).start(wait=False)
    try:
        assert kvd.process is not None
        process = kvd.process
        wait_for(lambda: process.poll() is not None or served(kvd), 45.0)
        assert process.poll() in {None, 1}, kvd.log
        assert process.poll() is None or "Error" in kvd.log
    finally:
        kvd.kill()


def test_with_little_memory_it_says_so_at_its_start(tmp_path: Path) -> None:
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (800 << 20, 800 << 20))\n"
    with patched(tmp_path, limit) as kvd:
        assert "800 MiB of address space (RLIMIT_AS), kvd wants 1024 MiB" in kvd.log
