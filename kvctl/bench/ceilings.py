"""What the machine can do at best: a copy within one process, one large transfer, a plain TCP stream."""

from __future__ import annotations

import functools
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvctl.bench.memory import ByteArray
from kvd.backends.contract import Lane, Operation, State
from kvd.geometry.model import Region, WorkerGeometry
from kvd.topology.descriptors import Descriptors

STREAM_CHUNK = 1 << 20


def memcpy(size: int) -> dict[str, Any]:
    """Copy ``size`` bytes within this process."""
    source, target = _scratch(size)
    started = time.perf_counter()
    np.copyto(target, source)
    return {"seconds": time.perf_counter() - started, "bytes": size}


def large(
    lane: Lane,
    peer: str,
    mine: WorkerGeometry,
    theirs: WorkerGeometry,
    operation: Operation,
    size: int,
    seconds: float,
) -> dict[str, Any]:
    """One descriptor between the largest regions of both, of ``size`` bytes or as many as they have.

    Raises `RuntimeError` where it fails, `TimeoutError` where it is not done within ``seconds``.
    """
    here, there = _largest(mine), _largest(theirs)
    size = min(size, here.length, there.length)
    rows = Descriptors(*(np.array([value], np.int64) for value in (here.address, there.address, size)))
    started = time.monotonic()
    transfer = lane.submit(peer, rows, operation)
    while lane.poll(transfer) is State.PENDING:
        if time.monotonic() - started > seconds:
            raise TimeoutError(f"one transfer of {size} bytes is not done within {seconds:g} s")
        time.sleep(50e-6)
    if transfer.state is State.FAILED:
        raise RuntimeError(f"one transfer of {size} bytes: {transfer.reason}")
    return {"seconds": time.monotonic() - started, "bytes": size}


@dataclass(slots=True)
class TcpStream:
    """One end of a TCP connection: a thread sends as many bytes as it is asked for."""

    listener: socket.socket | None = None
    connection: socket.socket | None = None
    thread: threading.Thread | None = None
    target: bytearray = field(default_factory=bytearray)

    def listen(self, host: str) -> int:
        """Take one connection at an address of this host; the port."""
        self.listener = socket.create_server((host, 0))
        self.thread = threading.Thread(target=self._send, daemon=True)
        self.thread.start()
        port: int = self.listener.getsockname()[1]
        return port

    def receive(self, address: tuple[str, int], size: int) -> dict[str, Any]:
        """Ask the other end for ``size`` bytes and wait for the last."""
        if self.connection is None:
            self.connection = socket.create_connection(address, timeout=60)
        if len(self.target) < size:
            self.target = bytearray(size)
        view = memoryview(self.target)[:size]
        started = time.perf_counter()
        self.connection.sendall(size.to_bytes(8, "big"))
        got = 0
        while got < size:
            more = self.connection.recv_into(view[got:])
            if not more:
                raise ConnectionError(f"the stream ended after {got} of {size} bytes")
            got += more
        return {"seconds": time.perf_counter() - started, "bytes": size}

    def close(self) -> None:
        """Hang up."""
        for end in (self.connection, self.listener):
            if end is not None:
                end.close()

    def _send(self) -> None:
        chunk = bytes(STREAM_CHUNK)
        try:
            assert self.listener is not None  # noqa: S101 - `listen` made it
            connection, _ = self.listener.accept()
            with connection:
                while head := connection.recv(8, socket.MSG_WAITALL):
                    left = int.from_bytes(head, "big")
                    while left:
                        left -= connection.send(chunk[: min(left, len(chunk))])
        except OSError:
            return  # the other end is gone, or this one was closed


def _largest(worker: WorkerGeometry) -> Region:
    return max(worker.regions, key=lambda region: region.length)


@functools.lru_cache(maxsize=1)
def _scratch(size: int) -> tuple[ByteArray, ByteArray]:
    """Two arrays of that size whose pages are there."""
    return np.ones(size, np.uint8), np.ones(size, np.uint8)
