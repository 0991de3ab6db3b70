"""Whatever arrives on the sockets, kvd keeps serving, answers in bounded time and counts it."""

from __future__ import annotations

import random
import resource
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import msgspec
import pytest
import zmq

from kvd.geometry.rank import Rank
from kvd.wire.frame import WIRE_VERSION, decode, encode
from kvd.wire.identity import Endpoint
from kvd.wire.push import (
    BlockRun,
    LayersThere,
    PushAnnounce,
    PushDone,
    PushKey,
    PushProgress,
    PushWithdraw,
)
from kvd.wire.query import GetStatus
from kvd.wire.registration import Heartbeat
from kvd.wire.reply import Ok, Refused
from tests.support.daemons import Daemon, daemons, facts, wait_for, worker

SEED = 7
REPLY_SECONDS = 3.0


def dealer(context: zmq.Context[zmq.Socket[bytes]], kvd: Daemon, where: str) -> zmq.Socket[bytes]:
    made = context.socket(zmq.DEALER)
    made.linger = 0
    made.rcvtimeo = 10_000
    made.connect(f"ipc://{kvd.directory}/kvd.sock" if where == "local" else f"tcp://127.0.0.1:{kvd.port}")
    return made


def serves(kvd: Daemon) -> dict[str, int]:
    """Its counters, asked for anew; it must have answered soon."""
    began = time.monotonic()
    counters = kvd.status().counters
    assert time.monotonic() - began < REPLY_SECONDS
    return counters


def counted(kvd: Daemon, what: str, least: int) -> dict[str, int]:
    """Its counters as soon as ``what`` is at least so much."""

    def look() -> dict[str, int] | None:
        counters = serves(kvd)
        return counters if counters.get(what, 0) >= least else None

    return wait_for(look, 30)


@pytest.mark.parametrize("where", ["local", "peer"])
def test_bad_frames_are_refused_by_code_and_counted_by_kind(where: str) -> None:
    good = encode(GetStatus(), 5)
    unknown = msgspec.msgpack.encode((WIRE_VERSION, 6, {"type": "warp"}))
    other = msgspec.msgpack.encode((WIRE_VERSION + 1, 7, {"type": "get_status"}))
    wrong = msgspec.msgpack.encode((WIRE_VERSION, 8, {"type": "heartbeat", "incarnation": 3}))
    huge_id = msgspec.msgpack.encode((WIRE_VERSION, 2**64 - 1, {"type": "get_status"}))
    cases: list[tuple[list[bytes], str, int]] = [
        ([good[:-3]], "KVD-WIRE-MALFORMED", 0),
        ([b""], "KVD-WIRE-MALFORMED", 0),
        ([wrong], "KVD-WIRE-MALFORMED", 8),
        ([unknown], "KVD-WIRE-UNKNOWN", 6),
        ([other], "KVD-WIRE-VERSION", 7),
        ([huge_id], "KVD-WIRE-MALFORMED", 0),
        ([good, good, good], "KVD-WIRE-MALFORMED", 0),
    ]
    with daemons() as (kvd,), zmq.Context() as context, dealer(context, kvd, where) as sender:
        for frames, code, correlation in cases:
            sender.send_multipart(frames)
            answer, of = decode(sender.recv())
            assert isinstance(answer, Refused)
            assert (answer.code, of) == (code, correlation), frames
        sender.send(encode(Ok(), 3))  # an answer that nobody asked for is not answered
        counters = counted(kvd, "received.unexpected", 1)
        assert counters["received.malformed"] == 4
        assert counters["received.unknown"] == 1
        assert counters["received.version"] == 1
        assert counters["received.frames"] == 1
        assert "errors.internal" not in counters, kvd.log


@pytest.mark.parametrize("where", ["local", "peer"])
def test_random_frames(where: str) -> None:
    noise = random.Random(SEED)
    key = PushKey(transfer_id="x", prefiller="p", prefiller_endpoint=Endpoint(), decoder="bent", rank=Rank(0))
    there = LayersThere(group=0, layers=("l",), tokens=16, blocks=BlockRun(0, 0, (1,)))
    good = [
        encode(message, 9)
        for message in (
            worker(facts("bent")),
            PushAnnounce(
                key=key, generations=("g", "h"), tokens=16, computed=0, blocks=(BlockRun(0, 0, (1, 2)),), window=b"l",
                seconds=1.0,
            ),
            PushWithdraw(key=key),
            PushProgress(key=key, source=Rank(0), there=(there,), failed="f"),
            PushDone(key=key),
        )
    ]  # fmt: skip
    with daemons() as (kvd,), zmq.Context() as context, dealer(context, kvd, where) as sender:
        for _ in range(3000):
            if noise.random() < 0.5:
                frames = [noise.randbytes(noise.randrange(200)) for _ in range(noise.choice((1, 1, 1, 2, 5)))]
            else:
                bent = bytearray(noise.choice(good))
                for _ in range(noise.randrange(1, 4)):
                    bent[noise.randrange(len(bent))] = noise.randrange(256)
                frames = [bytes(bent[: noise.choice((len(bent), noise.randrange(1, len(bent) + 1)))])]
            sender.send_multipart(frames)
        counters = counted(kvd, "received.malformed", 1000)
        assert counters["received.frames"] > 200
        assert "errors.internal" not in counters, kvd.log


@pytest.mark.parametrize("where", ["local", "peer"])
def test_a_frame_of_100_mb_costs_its_sender_the_connection_and_nobody_else(where: str) -> None:
    with daemons() as (kvd,), zmq.Context() as context, dealer(context, kvd, where) as sender:
        monitor = sender.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        sender.send(bytes(100 << 20))
        assert monitor.poll(20_000)
        serves(kvd)
        counted(kvd, f"connections.{where}.ended", 1)
        sender.disable_monitor()
        monitor.close()


def http(sock: socket.socket) -> None:
    sock.sendall(b"GET / HTTP/1.1\r\nHost: kvd\r\n\r\n")


def random_bytes(sock: socket.socket) -> None:
    sock.sendall(random.Random(SEED).randbytes(100_000))


def half_a_greeting(sock: socket.socket) -> None:
    sock.sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03")


@pytest.mark.parametrize("talk", [http, random_bytes, half_a_greeting])
def test_connections_that_do_not_speak_zmtp(talk: Callable[[socket.socket], None]) -> None:
    with daemons() as (kvd,):
        with ExitStack() as stack:
            for _ in range(20):
                local = stack.enter_context(socket.socket(socket.AF_UNIX))
                local.connect(str(kvd.directory / "kvd.sock"))
                peer = stack.enter_context(socket.create_connection(("127.0.0.1", kvd.port)))
                for sock in (local, peer):
                    with suppress(OSError):  # kvd may hang up while we talk: as good an end as any
                        talk(sock)
            serves(kvd)
        # Noise that could be the greeting of a very old ZMTP passes for a handshake and ends with its connection.
        wait_for(lambda: ended(kvd, "local") >= 20 and ended(kvd, "peer") >= 20, 30)
        counted(kvd, "connections.local.accepted", 20)
        counted(kvd, "connections.peer.accepted", 20)


def ended(kvd: Daemon, where: str) -> int:
    counters = serves(kvd)
    return sum(counters.get(f"connections.{where}.{how}", 0) for how in ("ended", "handshake_failed"))


def test_2000_connections_at_a_time() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with daemons() as (kvd,), ExitStack() as stack:
            for _ in range(1000):
                local = stack.enter_context(socket.socket(socket.AF_UNIX))
                local.connect(str(kvd.directory / "kvd.sock"))
                stack.enter_context(socket.create_connection(("127.0.0.1", kvd.port)))
            serves(kvd)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_belongs_on_another_socket_is_refused_and_says_so() -> None:
    with daemons() as (kvd,), zmq.Context() as context, dealer(context, kvd, "peer") as sender:
        sender.send(encode(Heartbeat(incarnation="i"), 4))
        answer, of = decode(sender.recv())
        assert isinstance(answer, Refused)
        assert (answer.code, of) == ("KVD-NOT-HERE", 4)
        assert "lease_claim" in answer.hint
        assert serves(kvd)["received.not_here"] == 1
