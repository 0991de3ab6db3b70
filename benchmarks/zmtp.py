"""What `kvd.zmtp` costs against libzmq: a server that sends each message back, once on either, in the same run.

    python benchmarks/zmtp.py [--sizes 60,4096,262144] [--seconds 1] [--rounds 5] [--json]

The client of both is a DEALER of pyzmq's in a process of its own, over loopback, with and without CURVE; up to 500
messages, or 4 MiB, are under way. libzmq's server is a ROUTER read with NOBLOCK until it is empty; its own thread does
part of the work on another core. Ours is one connection on a blocking socket, and all that there is.

Processor time is the server's, of all its threads. Rounds alternate, ratios are taken within a round.
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from statistics import median

import zmq

from kvd.zmtp import curve
from kvd.zmtp.connection import Connection, ConnectionLimits
from kvd.zmtp.curve import CurveServer
from kvd.zmtp.events import Received
from kvd.zmtp.null import Null

UNDER_WAY, BYTES_UNDER_WAY = 500, 4 << 20
LIMITS = ConnectionLimits(message=64 << 20)
Keys = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Row:
    """Medians for one size of message; the ratio is processor time of ours over libzmq's."""

    mechanism: str
    bytes: int
    ours_messages_per_second: int
    libzmq_messages_per_second: int
    ours_cpu_us: float
    libzmq_cpu_us: float
    cpu_ratio: float


def client(port: int, size: int, server: bytes | None, ended: Event) -> None:
    """Keep the server busy until told otherwise."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.sndhwm = dealer.rcvhwm = 0
        if server is not None:
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
            dealer.curve_serverkey = server
        dealer.connect(f"tcp://127.0.0.1:{port}")
        body = bytes(size)
        for _ in range(max(2, min(UNDER_WAY, BYTES_UNDER_WAY // size))):
            dealer.send(body)
        while not ended.is_set():
            if dealer.poll(100):
                with contextlib.suppress(zmq.Again):
                    while True:
                        dealer.recv(zmq.NOBLOCK)
                        dealer.send(body)


def ours(keys: Keys | None, listener: socket.socket) -> Iterator[int]:
    """Serve with `kvd.zmtp`; how many messages each step took."""
    mechanism = Null() if keys is None else CurveServer(keys[1], lambda _key: True)
    connection = Connection("ROUTER", mechanism, LIMITS)
    with listener.accept()[0] as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.sendall(connection.start())
        while data := stream.recv(1 << 18):
            answers: list[bytes] = []
            count = 0
            for event in connection.receive(data):
                if isinstance(event, Received):
                    count += 1
                    answers += connection.message(event.body)
            stream.sendall(connection.outgoing() + b"".join(answers))
            yield count


def libzmq(router: zmq.Socket[bytes]) -> Iterator[int]:
    """Serve with libzmq; how many messages each step took."""
    while True:
        count = 0
        if router.poll(1000):
            with contextlib.suppress(zmq.Again):
                while count < 1000:
                    router.send_multipart(router.recv_multipart(zmq.NOBLOCK))
                    count += 1
        yield count


def measured(steps: Iterator[int], seconds: float) -> tuple[float, float]:
    """Messages a second, and processor seconds for a message."""
    for _ in range(20):
        next(steps)
    count, started, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - started < seconds:
        count += next(steps)
    return count / (time.perf_counter() - started), (time.process_time() - cpu) / max(count, 1)


def one_round(which: str, size: int, keys: Keys | None, seconds: float) -> tuple[float, float]:
    """One server and its client."""
    spawn = multiprocessing.get_context("spawn")
    ended = spawn.Event()
    with contextlib.ExitStack() as stack:
        if which == "ours":
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port, steps = listener.getsockname()[1], ours(keys, listener)
        else:
            router = stack.enter_context(zmq.Context()).socket(zmq.ROUTER)
            stack.enter_context(router)
            router.linger = 0
            router.sndhwm = router.rcvhwm = 0
            if keys is not None:
                router.curve_server, router.curve_secretkey = True, keys[1]
            port, steps = router.bind_to_random_port("tcp://127.0.0.1"), libzmq(router)
        process = spawn.Process(target=client, args=(port, size, keys and keys[0], ended))
        process.start()
        try:
            return measured(steps, seconds)
        finally:
            ended.set()
            if which == "ours":
                steps.close()  # type: ignore[attr-defined]
            process.join()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="60,4096,262144")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for keys in (None, curve.generate()):
        for size in map(int, arguments.sizes.split(",")):
            rounds = [
                [one_round(which, size, keys, arguments.seconds) for which in ("ours", "libzmq")]
                for _ in range(arguments.rounds)
            ]
            rates = [median(one[side][0] for one in rounds) for side in (0, 1)]
            costs = [median(one[side][1] for one in rounds) * 1e6 for side in (0, 1)]
            row = Row(
                mechanism="NULL" if keys is None else "CURVE",
                bytes=size,
                ours_messages_per_second=round(rates[0]),
                libzmq_messages_per_second=round(rates[1]),
                ours_cpu_us=round(costs[0], 2),
                libzmq_cpu_us=round(costs[1], 2),
                cpu_ratio=round(median(one[0][1] / one[1][1] for one in rounds), 2),
            )
            if arguments.json:
                sys.stdout.write(json.dumps(asdict(row)) + "\n")
            else:
                sys.stdout.write(
                    f"{row.mechanism:6} {row.bytes:8} bytes   ours {row.ours_messages_per_second:8}/s"
                    f" {row.ours_cpu_us:8.2f} us   libzmq {row.libzmq_messages_per_second:8}/s"
                    f" {row.libzmq_cpu_us:8.2f} us   processor time x{row.cpu_ratio:.2f}\n"
                )


if __name__ == "__main__":
    main()
