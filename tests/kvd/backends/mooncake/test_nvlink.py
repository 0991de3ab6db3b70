"""Mooncake with GPU memory, over a made-up engine and a made-up driver: marks, registration, who may write."""

import threading
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from kvd.backends.contract import State
from kvd.backends.cuda import driver as cuda_driver
from kvd.backends.errors import BackendUnavailable, RegistrationError
from kvd.backends.mooncake.backend import MooncakeBackend
from kvd.backends.mooncake.lane import COPIED_AT_ONCE
from kvd.backends.mooncake.library import MooncakeLibrary
from kvd.backends.mooncake.options import mooncake_options
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors

ALLOCATION = Region(0x7F00_0000_0000, 64 << 20, "cuda:1")
KV = Region(ALLOCATION.address + (1 << 20), 32 << 20, "cuda:1")
MARKS = 0x7F10_0000_0000

Rows = list[tuple[int, int, int]]


class Gpu:
    """Device memory of marks, and what was asked of the device."""

    def __init__(self) -> None:
        self.bytes = bytearray(2 << 20)
        self.entered: list[int] = []
        self.settled = 0
        self.freed = 0

    def put(self, _: int, address: int, data: bytes) -> None:
        self.bytes[address - MARKS : address - MARKS + len(data)] = data

    def get(self, _: int, address: int, size: int) -> bytes:
        return bytes(self.bytes[address - MARKS : address - MARKS + size])


class Engine:
    """Stands for Mooncake's; copies between marks only, and refuses what lies beyond what it was told to."""

    gpu: Gpu
    alive: ClassVar[weakref.WeakSet["Engine"]] = weakref.WeakSet()
    refuses = False

    def __init__(self) -> None:
        self.registered: list[tuple[int, int]] = []
        self.copied: list[Rows] = []
        Engine.alive.add(self)

    def initialize(self, _host: str, _metadata: str, protocol: str, _devices: str) -> int:
        # A build without multi-node NVLink refuses plain "nvlink".
        return -1 if protocol == "nvlink" else 0

    def get_rpc_port(self) -> int:
        return 1

    def register_memory(self, address: int, length: int) -> int:
        self.registered.append((address, length))
        return 0

    def batch_transfer_async_read(
        self, _: str, local: list[int], remote: list[int], length: list[int]
    ) -> int:
        self.gpu.put(1, local[0], self.gpu.get(1, remote[0], length[0]))
        self.posted_by = threading.current_thread()
        return 7

    def transfer_check_status(self, _: int) -> int:
        # Mooncake's asks a stream that ended with the thread that posted, and with it the process.
        return 1 if threading.current_thread() is self.posted_by else -1

    def batch_transfer_sync_read_arrays(self, _: str, *columns: Any) -> int:
        assert all(c.dtype == np.uint64 for c in columns)
        self.copied.append(list(zip(*(c.tolist() for c in columns), strict=True)))
        return -1 if Engine.refuses else 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Engine.gpu = Gpu()
    Engine.refuses = False
    monkeypatch.setattr(cuda_driver, "enter", made.entered.append)
    monkeypatch.setattr(cuda_driver, "settle", lambda _: setattr(made, "settled", made.settled + 1))
    monkeypatch.setattr(cuda_driver, "allocate", lambda *_: MARKS)
    monkeypatch.setattr(cuda_driver, "free", lambda *_: setattr(made, "freed", made.freed + 1))
    monkeypatch.setattr(cuda_driver, "write", made.put)
    monkeypatch.setattr(cuda_driver, "read", made.get)
    monkeypatch.setattr(
        cuda_driver,
        "allocation",
        lambda r: ALLOCATION if r.address < MARKS else Region(MARKS, 2 << 20, r.device),
    )
    yield made
    assert not Engine.alive


def backend(protocol: str = "nvlink", *, nvlink: bool = True) -> MooncakeBackend:
    library = MooncakeLibrary(Engine, "0.3.14", cuda=True, nvlink=nvlink)
    return MooncakeBackend("worker", mooncake_options({"host": "127.0.0.1", "protocol": protocol}), library)


def rows(count: int) -> Descriptors:
    each = KV.address + np.arange(count, dtype=np.int64) * 4096
    return Descriptors(each, each[::-1].copy(), np.full(count, 4096, np.int64))


def test_whole_allocations_are_registered_and_the_marks_are_on_the_device(gpu: Gpu) -> None:
    """CUDA's handles stand for allocations, and NVLink moves no host memory."""
    made = backend()
    made.register([KV, Region(KV.address + KV.length, 4096, "cuda:1")])
    [engine] = Engine.alive
    assert engine.registered == [(ALLOCATION.address, ALLOCATION.length), (MARKS, 2 << 20)]
    assert set(gpu.entered) == {1}
    del engine
    made.close()
    assert gpu.freed == 1


def test_a_read_is_over_when_it_is_submitted(gpu: Gpu) -> None:
    made, peer = backend(), backend()
    for each in (made, peer):
        each.register([KV])
    lane = made.lane("p")
    lane.add("p", peer.metadata())
    transfer = lane.submit("p", rows(COPIED_AT_ONCE + 1))
    assert (transfer.state, transfer.descriptors) == (State.DONE, COPIED_AT_ONCE + 1)
    [copied] = [engine.copied for engine in Engine.alive if engine.copied]
    assert [len(part) for part in copied] == [COPIED_AT_ONCE, 1]
    settled = gpu.settled
    lane.close()
    assert gpu.settled == settled + 1  # what a GPU has queued outlives the engine
    made.close()
    peer.close()


def test_a_read_that_fails_says_which_rows(gpu: Gpu) -> None:
    made, peer = backend(), backend()
    for each in (made, peer):
        each.register([KV])
    lane = made.lane("p")
    lane.add("p", peer.metadata())
    Engine.refuses = True
    transfer = lane.submit("p", rows(3))
    assert transfer.state is State.FAILED
    assert "rows 0 to 2 of 3" in transfer.reason
    made.close()
    peer.close()
    assert gpu.freed == 2


@pytest.mark.usefixtures("gpu")
def test_nobody_may_write_by_cuda_ipc() -> None:
    """The writer's process would copy, and closing a window here would not stop it."""
    made = backend()
    made.register([KV])
    assert not made.traits.lands
    with pytest.raises(BackendUnavailable, match="nothing done here would stop it"):
        made.window("p")
    made.close()


def test_host_memory_does_not_go_that_way() -> None:
    made = backend()
    with pytest.raises(RegistrationError, match="protocol is nvlink and memory is on the host"):
        made.register([Region(4096, 4096)])
    made.close()


@pytest.mark.usefixtures("gpu")
def test_a_build_without_nvlink_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MC_INTRANODE_NVLINK", raising=False)
    made = backend(nvlink=False)
    with pytest.raises(RegistrationError, match="protocol is nvlink and this build"):
        made.register([KV])
    made.close()
