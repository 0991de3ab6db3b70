"""The measure of all tests here is right itself: it finds what is bad about servers that are bad on purpose.

How to write one of these tests stands at the top of `tests/support/attacked.py`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from kvd.wire.frame import decode, encode
from kvd.wire.names import socket_address
from kvd.wire.registration import NotRegistered
from tests.support.attacked import Attacker, Watch, assert_unfelled, attack, attacked, attacking
from tests.support.daemons import Daemon, daemons, wait_for

MEASURED_SECONDS = 1.0
HELD_SECONDS = 0.2


def answers(directory: Path, fault: str) -> None:
    """A server that answers pings, with a fault that begins when there is a file "go" in its directory."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(socket_address(directory))
    answer = NotRegistered(kvd_generation="bad")
    memory = b""
    held = 0.0
    while True:
        went = (directory / "go").exists()
        if went and fault == "dies":
            os._exit(0)
        if went and fault == "silent":
            threading.Event().wait()
        if went and fault == "grows" and not memory:
            memory = os.urandom(1 << 20) * 400
            (directory / "grown").touch()
        if went and fault == "sleeps" and time.monotonic() > held + 2 * HELD_SECONDS:
            time.sleep(HELD_SECONDS)
            held = time.monotonic()
        if socket.poll(10):
            route, frame = socket.recv_multipart()
            socket.send_multipart([route, encode(answer, decode(frame)[1])])


@contextmanager
def bad(directory: Path, fault: str) -> Iterator[Watch]:
    """A watch on such a server, which shows its fault."""
    with attacking(answers, directory, fault) as server:
        kvd = Daemon(directory, process=server.process)  # type: ignore[arg-type]
        with attacked(kvd) as watch:
            (directory / "go").touch()
            if fault == "dies":
                assert server.wait(10.0)
            else:
                if fault == "grows":
                    wait_for((directory / "grown").exists, 30.0)
                time.sleep(MEASURED_SECONDS)
            yield watch


def test_a_server_that_stands_still_is_found(tmp_path: Path) -> None:
    with bad(tmp_path, "sleeps") as watch:
        verdict = watch.verdict()
    assert HELD_SECONDS / 2 < verdict.p99 <= verdict.worst
    assert verdict.alive
    assert not verdict.unanswered
    with pytest.raises(AssertionError, match=r"kept others waiting over 50 ms: alive; .* p99 \d+\.\d ms"):
        assert_unfelled(verdict)


def test_a_server_that_takes_memory_is_found(tmp_path: Path) -> None:
    with bad(tmp_path, "grows") as watch:
        verdict = watch.verdict()
    assert 400 << 20 < verdict.rss_peak < 500 << 20
    with pytest.raises(AssertionError, match=r"RSS at most 4\d\d MiB"):
        assert_unfelled(verdict, ping_seconds=10.0)


def test_a_server_that_answers_nothing_is_found(tmp_path: Path) -> None:
    with bad(tmp_path, "silent") as watch:
        verdict = watch.verdict()
    assert verdict.alive
    assert verdict.unanswered > 100
    assert verdict.p99 > MEASURED_SECONDS


def test_a_server_that_ends_is_found(tmp_path: Path) -> None:
    with bad(tmp_path, "dies") as watch:
        verdict = watch.verdict()
    assert not verdict.alive
    with pytest.raises(AssertionError, match="kvd ended: DEAD"):
        assert_unfelled(verdict)


def spin() -> None:
    while True:
        pass


def broken() -> None:
    raise RuntimeError("no attack")


def waits(forever: bool) -> None:
    if forever:
        threading.Event().wait()


def test_a_kvd_is_not_blamed_for_a_processor_that_others_use() -> None:
    with daemons() as (kvd,), attacked(kvd) as watch, attacking(spin), attacking(spin), attacking(spin):
        time.sleep(MEASURED_SECONDS)
        verdict = watch.verdict()
    assert verdict.pings > 20
    assert_unfelled(verdict)


def test_an_attack_that_fails_fails_the_test() -> None:
    with pytest.raises(AssertionError, match="broken failed"), attacking(broken) as attacker:
        attacker.wait(20.0)


def test_an_attacker_ends_with_its_block() -> None:
    attackers: list[Attacker] = []
    with attacking(waits, True) as attacker:
        attackers.append(attacker)
        assert not attacker.wait(0.0)
    wait_for(lambda: not Path(f"/proc/{attackers[0].process.pid}").exists())
    assert attack(waits, False, seconds=20.0)
    assert not attack(waits, True, seconds=0.1)
