"""The service manager's protocol, spoken by a real kvd to a real datagram socket."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvd.service.notify import Notifier, from_environment
from kvd.wire.query import GetStatus, KvdStatus
from tests.support.daemons import Daemon, daemons, facts, session, wait_for, worker


@contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address[1:] if address.startswith("@") else address)
        manager.settimeout(20)
        yield manager


def read(manager: socket.socket, wanted: str) -> str:
    """The next message with a line that begins with ``wanted``."""
    while True:
        text = manager.recv(4096).decode()
        if any(line.startswith(wanted) for line in text.splitlines()):
            return text


@pytest.mark.parametrize("abstract", [True, False])
def test_ready_watchdog_reload_and_stop(tmp_path: Path, abstract: bool) -> None:
    address = f"@kvd-test-{tmp_path.name}-{time.time_ns()}" if abstract else str(tmp_path / "n")
    with listening(address) as manager, daemons() as (kvd,):
        kvd.kill()
        config = tmp_path / "kvd.yaml"
        config.write_text("liveness:\n  heartbeat_seconds: 0.25\n")
        kvd.arguments = ("--config", str(config))
        kvd.environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "300000"}
        kvd.start(wait=False)
        assert "STATUS=serving" in read(manager, "READY=1")
        assert isinstance(kvd.ask(GetStatus()), KvdStatus)  # ready means that the sockets are bound
        for _ in range(3):
            read(manager, "WATCHDOG=1")

        config.write_text("liveness:\n  heartbeat_seconds: 0.1\nledger: {max_rows: x}\n")
        kvd.signal(signal.SIGHUP)
        assert "MONOTONIC_USEC=" in read(manager, "RELOADING=1")
        assert "NOT reloaded" in read(manager, "READY=1")
        config.write_text("liveness:\n  heartbeat_seconds: 0.1\nmetrics:\n  listen: 127.0.0.1:0\n")
        kvd.signal(signal.SIGHUP)
        read(manager, "RELOADING=1")
        assert "need a restart: metrics" in read(manager, "READY=1")
        assert kvd.status().counters["reloads.done"] == 1

        kvd.process.terminate()  # type: ignore[union-attr]
        read(manager, "STOPPING=1")
        assert kvd.process is not None
        assert kvd.process.wait(15) == 0


def test_a_stopped_kvd_feeds_no_watchdog(tmp_path: Path) -> None:
    address = str(tmp_path / "n")
    with listening(address) as manager, daemons() as (kvd,):
        kvd.kill()
        kvd.environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "300000"}
        kvd.start()
        read(manager, "WATCHDOG=1")
        kvd.signal(signal.SIGSTOP)
        manager.settimeout(0.5)
        for _ in range(20):  # what it had sent before
            try:
                manager.recv(4096)
            except TimeoutError:
                break
        else:
            pytest.fail("a stopped kvd feeds the watchdog")
        kvd.signal(signal.SIGCONT)
        manager.settimeout(20)
        read(manager, "WATCHDOG=1")


def test_the_environment_of_another_process_does_not_count() -> None:
    given = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}
    assert from_environment(given) == Notifier("/x", 0.0)
    assert from_environment({}) == Notifier()
    Notifier("/does/not/exist").watchdog()  # nobody there: no reason to fail


def test_a_second_kvd_on_a_directory_is_refused_and_a_dead_ones_place_is_taken() -> None:
    with daemons() as (kvd,):
        second = Daemon(kvd.directory).start(wait=False)
        assert second.process is not None
        assert second.process.wait(20) == 2
        assert f"another kvd (process {kvd.pid}) serves {kvd.directory}" in kvd.log
        kvd.kill()
        assert (kvd.directory / "kvd.sock").exists()
        kvd.start()
        assert kvd.directory.stat().st_mode & 0o777 == 0o750


def test_sigterm_does_not_end_leases_or_engines_for_their_clients() -> None:
    with daemons() as (kvd,), session(kvd, worker(facts("e"))) as one:
        assert kvd.stop() == 0
        one.wait(lambda s: not s.connected, 20)
        kvd.start()
        wait_for(lambda: one.state.connected)
        assert one.state.registrations == 2
