"""Whoever reaches the port of /metrics, and a user whose engines make its page large."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvd.service.handlers.outcomes import MOST_TOLD_BYTES
from kvd.wire.frame import decode, encode
from kvd.wire.outcomes import OutcomeCount, ReportOutcomes
from kvd.wire.registration import Registered
from kvd.wire.reply import Ok
from tests.kvd.service.test_metrics import get
from tests.support.attacked import assert_unfelled, attacked, attacking
from tests.support.daemons import Daemon, daemons, facts, scheduler
from tests.support.ports import free_port

ATTACK_SECONDS = 3.0


@pytest.fixture
def kvd() -> Iterator[tuple[Daemon, int]]:
    port = free_port()
    with daemons() as (one,):
        one.kill()
        one.environment = {"KVD_METRICS_LISTEN": f"127.0.0.1:{port}"}
        one.start()
        yield one, port


def heads_without_end(port: int) -> None:
    """As many connections as one address may have, each with lines of two bytes for as long as they are taken."""
    lines = b"a\n" * (64 << 10)
    with selectors.DefaultSelector() as ready:
        for _ in range(16):
            connect(port, ready, selectors.EVENT_WRITE).setblocking(False)
        while True:
            for key, _ in ready.select():
                made = key.fileobj
                assert isinstance(made, socket.socket)
                try:
                    made.send(lines)
                except BlockingIOError:
                    continue
                except OSError:
                    ready.unregister(made)
                    made.close()
                    connect(port, ready, selectors.EVENT_WRITE).setblocking(False)


def test_heads_without_end_keep_nobody_waiting(kvd: tuple[Daemon, int]) -> None:
    one, port = kvd
    with attacked(one) as watch, attacking(heads_without_end, port):
        time.sleep(ATTACK_SECONDS)
    assert_unfelled(watch.verdict())


def scrapes(port: int) -> None:
    """Pages are asked for as fast as they come, on as many connections as one address may have; they are read."""
    ask = b"GET /metrics HTTP/1.1\r\n\r\n"
    with selectors.DefaultSelector() as ready:
        for _ in range(16):
            connect(port, ready, selectors.EVENT_READ).sendall(ask)
        while True:
            for key, _ in ready.select():
                made = key.fileobj
                assert isinstance(made, socket.socket)
                with contextlib.suppress(OSError):
                    if made.recv(1 << 20):
                        continue
                ready.unregister(made)
                made.close()
                connect(port, ready, selectors.EVENT_READ).sendall(ask)


def connect(port: int, ready: selectors.BaseSelector, event: int) -> socket.socket:
    """One more connection, which is looked at for that event."""
    made = socket.create_connection(("127.0.0.1", port))
    ready.register(made, event)
    return made


def report_much(directory: Path, engines: int) -> list[zmq.Socket[bytes]]:
    """Schedulers with the longest names, each with as many codes as are told apart, which are as long as they may be.

    They end with their connections.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    made = []
    for number in range(engines):
        dealer = context.socket(zmq.DEALER)
        dealer.linger, dealer.rcvtimeo = 0, 20_000
        dealer.connect(f"ipc://{directory}/kvd.sock")
        name = f"{number}".rjust(512, "e")
        counts = tuple(OutcomeCount("missed", f"{code}".rjust(64, "C"), 1, 1) for code in range(128))
        for correlation, message in enumerate(
            (scheduler(facts(name)), ReportOutcomes(engine_id=name, totals=counts)), 1
        ):
            dealer.send(encode(message, correlation))
            assert isinstance(decode(dealer.recv())[0], Registered | Ok)
        made.append(dealer)
    return made


def test_a_user_with_many_engines_and_codes_makes_no_page_large(kvd: tuple[Daemon, int]) -> None:
    """100 engines made a page of 19 MB, and each time that it was asked for nobody else had a turn."""
    one, port = kvd
    made = report_much(one.directory, 100)
    try:
        with attacked(one) as watch, attacking(scrapes, port):
            time.sleep(ATTACK_SECONDS)
        page = get(port, "/metrics")[1]
    finally:
        for dealer in made:
            dealer.close()
    assert MOST_TOLD_BYTES // 2 < len(page) < 2 * MOST_TOLD_BYTES
    assert_unfelled(watch.verdict())
