"""The connection of a session: what it does when kvd reads slowly, breaks off, or is none."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

from kvd.client import line as lines
from kvd.client.line import LocalLine
from kvd.client.session import KvdSession
from kvd.zmtp.events import Handshaken, Received
from kvd.zmtp.frames import buffers
from tests.support.daemons import facts, worker
from tests.support.zmtp_shim import Shim, listening

SECONDS = 10.0


class LineRig:
    """A line, and what it told of its connections."""

    def __init__(self, address: str) -> None:
        self.wake = os.eventfd(0, os.EFD_NONBLOCK)
        self.told: list[bool] = []
        self.line = LocalLine(address, (self.wake,), self.told.append)

    def messages(self, count: int) -> list[bytes]:
        """So many messages, as soon as they are here."""
        found: list[bytes] = []
        until = time.monotonic() + SECONDS
        while len(found) < count and time.monotonic() < until:
            self.line.wait(100)
            self.line.flush()
            found += islice(self.line.received(), count - len(found))
        return found

    def until(self, told: list[bool]) -> None:
        """Serve it until it has told just this."""
        until = time.monotonic() + SECONDS
        while self.told != told and time.monotonic() < until:
            self.line.wait(100)
            assert not list(self.line.received())
        assert self.told == told


@pytest.fixture
def kvd(tmp_path: Path) -> Iterator[tuple[socket.socket, LineRig]]:
    with listening(tmp_path / "kvd.sock") as (listener, address):
        side = LineRig(address)
        try:
            yield listener, side
        finally:
            side.line.close()
            os.close(side.wake)


def accepted(listener: socket.socket, side: LineRig) -> socket.socket:
    listener.setblocking(False)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        side.line.wait(20)
        try:
            return listener.accept()[0]
        except BlockingIOError:
            continue
    raise AssertionError("the line makes no connection")


@contextmanager
def connected(listener: socket.socket, side: LineRig) -> Iterator[Shim]:
    """The line's next connection, which it makes after a pause where it had one."""
    with accepted(listener, side) as stream:
        peer = Shim(stream, "ROUTER")
        side.until([*side.told, True])
        assert peer.event() == Handshaken("DEALER", b"")
        yield peer


def test_nothing_is_taken_for_a_kvd_that_is_away(kvd: tuple[socket.socket, LineRig]) -> None:
    listener, side = kvd
    assert not side.line.send(b"too early")
    with connected(listener, side) as peer:
        assert side.line.send(b"in time")
        assert peer.event() == Received(b"in time", 1, 7)


def test_messages_of_any_size_pass_in_both_directions(kvd: tuple[socket.socket, LineRig]) -> None:
    listener, side = kvd
    with connected(listener, side) as peer:
        for size in (0, 1, 255, 256, 4096, 4097, lines.READ_BYTES, 1 << 20):
            body = os.urandom(size)
            assert side.line.send(body)
            peer.stream.settimeout(0.01)
            while True:
                side.line.wait(10)
                side.line.flush()  # what the kernel did not take goes on here
                try:
                    received = peer.event()
                    break
                except TimeoutError:
                    continue
            peer.stream.settimeout(SECONDS)
            assert received == Received(body, 1, size)
        small = [bytes([number]) * number for number in range(100)]
        peer.stream.sendall(b"".join(b"".join(buffers(body)) for body in small))
        assert side.messages(len(small)) == small


def test_a_message_that_comes_in_pieces_is_one(kvd: tuple[socket.socket, LineRig]) -> None:
    listener, side = kvd
    body = os.urandom(3000)
    frame = b"".join(buffers(body))
    with connected(listener, side) as peer:
        for at in range(0, len(frame), 1000):
            assert not list(side.line.received())
            peer.stream.sendall(frame[at : at + 1000])
            side.line.wait(1000)
        assert side.messages(1) == [body]


def test_what_is_not_taken_comes_the_next_time_without_news_of_the_kernel(
    kvd: tuple[socket.socket, LineRig],
) -> None:
    listener, side = kvd
    with connected(listener, side) as peer:
        peer.send(b"one")
        peer.send(b"two")
        assert side.messages(1) == [b"one"]
        began = time.monotonic()
        side.line.wait(5000)
        assert list(side.line.received()) == [b"two"]
        assert time.monotonic() - began < 4


def test_a_connection_that_is_lost_within_a_message_is_made_anew_and_the_rest_forgotten(
    kvd: tuple[socket.socket, LineRig],
) -> None:
    listener, side = kvd
    with connected(listener, side) as peer:
        peer.stream.sendall(b"".join(buffers(b"x" * 3000))[:1000])
    side.until([True, False])
    assert not side.line.send(b"lost")
    with connected(listener, side) as peer:
        peer.send(b"whole")
        assert side.messages(1) == [b"whole"]
    assert side.told[:3] == [True, False, True]


def test_who_speaks_no_zmtp_is_left_alone_for_a_moment(
    kvd: tuple[socket.socket, LineRig], caplog: pytest.LogCaptureFixture
) -> None:
    listener, side = kvd
    with accepted(listener, side) as stream:
        stream.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        side.line.wait(5000)
        assert not list(side.line.received())
    assert "does not speak ZMTP 3" in caplog.text
    assert side.told == []
    with connected(listener, side):
        pass


def test_a_kvd_that_never_answers_is_tried_again(
    kvd: tuple[socket.socket, LineRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "HANDSHAKE_SECONDS", 0.05)
    listener, side = kvd
    with accepted(listener, side) as silent:
        side.line.wait(5000)
        side.line.wait(0)
        silent.settimeout(SECONDS)
        while silent.recv(1024):
            pass
    monkeypatch.undo()
    with connected(listener, side):
        pass


def test_a_kvd_that_reads_nothing_is_sent_no_more_than_is_kept(
    kvd: tuple[socket.socket, LineRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MOST_UNSENT", 8)
    listener, side = kvd
    with connected(listener, side) as peer:
        sent = 0
        while side.line.send(sent.to_bytes(4) + bytes(100_000)):
            sent += 1
        assert sent >= 4
        for number in range(sent):
            peer.stream.setblocking(False)
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                side.line.wait(1)
                side.line.flush()
                try:
                    event = peer.event()
                    break
                except BlockingIOError:
                    continue
            assert isinstance(event, Received)
            assert event.body[:4] == number.to_bytes(4)
        assert side.line.send(b"again")


def test_a_session_is_one_thread(tmp_path: Path) -> None:
    tasks = Path("/proc/self/task")
    before = {task.name for task in tasks.iterdir()}
    one = KvdSession(lambda: worker(facts("e")), directory=tmp_path)
    assert len({task.name for task in tasks.iterdir()} - before) == 1
    one.close()
