"""Staged between processes of one host: the peer's mirror is mapped, and the engine, which reaches nobody, not used."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kvd.backends.contract import Lane, State, Transfer
from kvd.backends.cuda import driver as cuda_driver
from kvd.backends.cuda.driver import CudaError
from kvd.backends.envelope import pack, unpack
from kvd.backends.errors import TransferRefused, WorkerUnreachable
from kvd.backends.memory import MemoryLane
from kvd.backends.staged import backend as staged
from kvd.backends.staged.lane import Mirrored
from kvd.backends.staged.near import _AT_A_TIME, Pins
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from tests.support.backend_peer import pattern
from tests.support.direct_started import Worker

SIZE = 1 << 16


@contextmanager
def peer_of(memory: str) -> Iterator[Worker]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.staged_peer", str(SIZE), memory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        hello = json.loads(process.stdout.readline())
        yield Worker(process, bytes.fromhex(hello["metadata"]), hello["address"])
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def peer() -> Iterator[Worker]:
    with peer_of("memfd") as worker:
        worker.order("stage")
        yield worker


class Reader:
    """KV memory and a staged backend over it."""

    def __init__(self) -> None:
        self.memory = np.zeros(SIZE, np.uint8)
        self.backend = staged.open_backend("d", options={"engine": "memory"})
        self.backend.register([Region(self.memory.ctypes.data, SIZE)])

    def lane(self, metadata: bytes) -> Lane:
        lane = self.backend.lane("peer")
        lane.add("p", metadata)
        return lane

    def rows(self, peer: Worker, *pieces: tuple[int, int, int]) -> Descriptors:
        mine, theirs, length = np.array(pieces, np.int64).T
        return Descriptors(mine + self.memory.ctypes.data, theirs + peer.address, length)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """Its engine refuses to read a peer only when it is asked to, as one that is told of another process would."""
    monkeypatch.setattr(MemoryLane, "add", lambda *_: None)
    made = Reader()
    yield made
    made.backend.close()


def finish(lane: Lane, transfer: Transfer) -> State:
    while lane.poll(transfer) is State.PENDING:
        pass
    return transfer.state


def test_what_the_peer_put_out_is_read_and_not_what_came_later(peer: Worker, reader: Reader) -> None:
    peer.order("zero")
    lane = reader.lane(peer.metadata)
    read = reader.rows(peer, (40, 100, 200), (1000, 9, 1))
    assert finish(lane, lane.submit("p", read)) is State.DONE
    expected = np.zeros(SIZE, np.uint8)
    expected[40:240] = pattern(SIZE)[100:300]
    expected[1000] = pattern(SIZE)[9]
    assert (reader.memory == expected).all()


def test_what_the_peer_staged_before_it_died_is_whole_and_no_new_read_begins(
    peer: Worker, reader: Reader
) -> None:
    lane = reader.lane(peer.metadata)
    transfer = lane.submit("p", reader.rows(peer, (0, 0, SIZE)))
    peer.kill()
    assert finish(lane, transfer) is State.DONE
    assert (reader.memory == pattern(SIZE)).all()
    with pytest.raises(WorkerUnreachable, match="process is gone"):
        lane.submit("p", reader.rows(peer, (0, 0, SIZE)))


def test_a_backend_that_is_closed_meanwhile_fails_what_is_read_from_it(peer: Worker, reader: Reader) -> None:
    lane = reader.lane(peer.metadata)
    transfer = lane.submit("p", reader.rows(peer, (0, 0, 100)))
    peer.order("close")
    assert finish(lane, transfer) is State.FAILED
    assert "of the peer was closed" in transfer.reason
    with pytest.raises(WorkerUnreachable, match="was closed"):
        lane.submit("p", reader.rows(peer, (0, 0, 100)))


def test_only_what_is_registered_is_read(peer: Worker, reader: Reader) -> None:
    lane = reader.lane(peer.metadata)
    with pytest.raises(TransferRefused, match="remote descriptor 0"):
        lane.submit("p", reader.rows(peer, (0, 1, SIZE)))


def test_a_peer_that_shares_nothing_or_is_elsewhere_is_the_engines(reader: Reader) -> None:
    """The engine of these tests knows no peer, so the refusal is its own."""
    with peer_of("memfd") as peer, peer_of("anonymous") as other:
        for metadata in (other.metadata, _moved(peer.metadata)):
            lane = reader.lane(metadata)
            with pytest.raises(TransferRefused) as refused:
                lane.submit("p", reader.rows(peer if metadata != other.metadata else other, (0, 0, 1)))
            assert refused.value.backend == "memory"


def _moved(metadata: bytes) -> bytes:
    envelope = unpack(metadata, backend="staged")
    told = msgspec.msgpack.decode(envelope.blob, type=Mirrored)
    assert told.card is not None
    process = msgspec.structs.replace(told.card.process, boot="another")
    card = msgspec.structs.replace(told.card, process=process)
    return pack(replace(envelope, blob=msgspec.msgpack.encode(msgspec.structs.replace(told, card=card))))


class Registering:
    """A driver that takes note of what it registers, and waits before each part if it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts: list[tuple[int, int]] = []
        self.refuses = False
        self.begun, self.go = threading.Event(), threading.Event()
        monkeypatch.setattr(cuda_driver, "pin", self.pin)
        monkeypatch.setattr(cuda_driver, "unpin", lambda _, at: self.parts.remove(self._part(at)))

    def pin(self, _device: int, address: int, size: int) -> None:
        self.begun.set()
        self.go.wait(10)
        if self.refuses:
            raise CudaError("cuMemHostRegister_v2", 801, "operation not supported")
        self.parts.append((address, size))

    def _part(self, address: int) -> tuple[int, int]:
        return next(part for part in self.parts if part[0] == address)


@pytest.fixture
def registering(monkeypatch: pytest.MonkeyPatch) -> Registering:
    return Registering(monkeypatch)


def test_mirrors_are_registered_in_parts_beside_the_lane(registering: Registering) -> None:
    pins = Pins("cuda:0")
    pins.start([(1 << 40, 2 * _AT_A_TIME + 5), (1 << 50, 7)])
    assert registering.begun.wait(10)
    assert (pins.ready, registering.go.is_set()) == (False, False)
    registering.go.set()
    assert pins._thread is not None
    pins._thread.join()
    assert pins.ready
    assert registering.parts == [
        (1 << 40, _AT_A_TIME),
        ((1 << 40) + _AT_A_TIME, _AT_A_TIME),
        ((1 << 40) + 2 * _AT_A_TIME, 5),
        (1 << 50, 7),
    ]
    pins.close()
    assert (registering.parts, pins.ready) == ([], False)


def test_closing_waits_for_the_part_under_way_and_begins_no_other(registering: Registering) -> None:
    pins = Pins("cuda:0")
    pins.start([(1 << 40, 3 * _AT_A_TIME)])
    assert registering.begun.wait(10)
    closing = threading.Thread(target=pins.close)
    closing.start()
    registering.go.set()
    closing.join(10)
    assert not closing.is_alive()
    assert registering.parts == []


def test_a_device_that_registers_nothing_leaves_the_engine(
    registering: Registering, caplog: pytest.LogCaptureFixture
) -> None:
    registering.refuses = True
    registering.go.set()
    pins = Pins("cuda:0")
    with caplog.at_level("WARNING"):
        pins.start([(1 << 40, 5)])
        assert registering.begun.wait(10)
        pins.close()
    assert not pins.ready
    assert "read through the engine: cuMemHostRegister_v2: operation not supported (801)" in caplog.text
