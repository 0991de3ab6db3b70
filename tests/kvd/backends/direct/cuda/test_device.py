"""A lane between GPUs and the real process it reads: devices, driver and kernel are made up, memory is a memfd."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvd.backends.contract import State
from kvd.backends.direct.backend import DirectBackend, DirectOptions, open_backend
from kvd.backends.direct.card import Card, CudaCard, SharedStretch
from kvd.backends.direct.cuda import lane as direct_cuda_lane
from kvd.backends.direct.cuda.lane import CudaLane
from kvd.backends.direct.cuda.memory import (
    MOST_PARTS,
    Mappings,
    ipc_namespace,
    share,
    stretches,
    unshare,
)
from kvd.backends.direct.process import this_process
from kvd.backends.envelope import pack, unpack
from kvd.backends.errors import (
    BackendError,
    PeerMetadataError,
    RegistrationError,
    TransferRefused,
    WorkerUnreachable,
)
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import BlockSelection, Grid, RowBlocks, Selection
from tests.support.backend_peer import pattern
from tests.support.direct_gpu import MadeUpCopier, MadeUpDriver, handle_of
from tests.support.direct_started import Worker, started

SIZE = 1 << 20


@dataclass
class Peer:
    worker: Worker

    def metadata(self, *, process: dict[str, Any] | None = None, **changes: Any) -> bytes:
        """As if its memory were a device's; with other words on its card."""
        envelope = unpack(self.worker.metadata, backend="direct")
        card = msgspec.json.decode(envelope.blob, type=Card)
        handle = handle_of(card.process.pid, card.memory[0], SIZE)
        shared = SharedStretch(self.worker.address, SIZE, handle)
        cuda = CudaCard(
            **{"device": "gpu-b", "ipc_namespace": ipc_namespace(), "memory": (shared,), **changes}
        )
        moved = msgspec.structs.replace(card.process, **(process or {}))
        told = msgspec.structs.replace(card, cuda=cuda, memory=(), process=moved)
        return pack(replace(envelope, blob=msgspec.json.encode(told)))


@pytest.fixture
def peer() -> Iterator[Peer]:
    with started(SIZE, memfd=True) as worker:
        yield Peer(worker)


@dataclass
class Reader:
    driver: MadeUpDriver = field(default_factory=MadeUpDriver)
    buffer: Any = field(default_factory=lambda: np.zeros(SIZE, np.uint8))
    copier: MadeUpCopier = field(default_factory=MadeUpCopier)

    def __post_init__(self) -> None:
        self.mappings = Mappings(self.driver)  # type: ignore[arg-type]
        self.lanes: set[CudaLane] = set()

    def lane(self, metadata: bytes | None = None) -> CudaLane:
        regions = [Region(self.buffer.ctypes.data, SIZE, "cuda:0")]
        lane = CudaLane(
            "one",
            this_process(),
            regions,
            self.driver,  # type: ignore[arg-type]
            self.mappings,
            self.copier,
            self.lanes.discard,
        )
        self.lanes.add(lane)
        if metadata is not None:
            lane.add("p", metadata)
        return lane

    def all(self, peer: Peer) -> Descriptors:
        columns = (self.buffer.ctypes.data, peer.worker.address, SIZE)
        return Descriptors(*(np.array([value], np.int64) for value in columns))

    def selection(self, peer: Peer) -> Selection:
        """Every second of 64 blocks, in another order there, by two rows."""
        blocks, stride = 64, SIZE // 64
        row, each = np.array([0, stride // 2], np.int64), np.full(2, stride // 2)
        grid = Grid(
            self.buffer.ctypes.data + row,
            peer.worker.address + row,
            each,
            np.full(2, stride),
            np.full(2, stride),
            blocks,
            blocks,
        )
        mine, theirs = np.arange(0, 64, 2), np.arange(0, 64, 2)[::-1]
        first = np.arange(2)[:, None] * blocks
        return Selection(
            grid,
            (first + mine).ravel().astype(np.int32),
            (first + theirs).ravel().astype(np.int32),
            SIZE // 2,
        )

    def blocks(self, peer: Peer) -> BlockSelection:
        """The same by numbers of blocks."""
        mine = np.arange(0, 64, 2, dtype=np.int32)
        return BlockSelection(self.selection(peer).grid, (RowBlocks(0, 2, mine, mine[::-1]),), SIZE // 2)


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.copier.let_go()
    for lane in list(made.lanes):
        lane.close()
    assert not made.driver.open, "all that was mapped is unmapped"


def test_reads_by_address_and_by_number(peer: Peer, reader: Reader) -> None:
    lane = reader.lane(peer.metadata())
    transfer = lane.submit("p", reader.all(peer))
    assert lane.poll(transfer) is State.DONE
    assert (reader.buffer == pattern(SIZE)).all()
    assert transfer.detail == {"device_seconds": 0.25}
    stride = SIZE // 64
    expected = np.zeros(SIZE, np.uint8).reshape(64, stride)
    expected[0:64:2] = pattern(SIZE).reshape(64, stride)[0:64:2][::-1]
    for selection in (reader.selection(peer), reader.blocks(peer)):
        reader.buffer[:] = 0
        transfer = lane.submit_selection("p", selection)
        assert lane.poll(transfer) is State.DONE
        assert (reader.buffer == expected.ravel()).all()
        assert (transfer.bytes, transfer.descriptors) == (SIZE // 2, 64)


def test_the_rows_of_a_plan_go_to_the_device_once(peer: Peer, reader: Reader) -> None:
    lane, selection = reader.lane(peer.metadata()), reader.blocks(peer)
    for _ in range(3):
        lane.submit_selection("p", selection)
    assert len(reader.copier.kept) == 1
    assert len(reader.copier.flights) == 3


def test_from_the_first_large_copy_on_it_is_known_when_one_is_over(
    peer: Peer, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, selection = reader.lane(peer.metadata()), reader.blocks(peer)
    assert lane.poll(lane.submit_selection("p", selection)) is State.DONE
    small = lane.submit_selection("p", selection)
    assert small.due == 0, "so small a copy tells nothing"
    assert lane.poll(small) is State.DONE
    monkeypatch.setattr(direct_cuda_lane, "_TELLING", 0)
    assert lane.poll(lane.submit_selection("p", selection)) is State.DONE
    first, second = (lane.submit_selection("p", selection) for _ in range(2))
    assert first.due == pytest.approx(first.posted + 0.25, abs=0.01)
    assert second.due == pytest.approx(first.due + 0.25, abs=0.01), "they follow each other"
    assert {lane.poll(transfer) for transfer in (first, second)} == {State.DONE}
    third = lane.submit_selection("p", selection)
    assert third.due == pytest.approx(third.posted + 0.25, abs=0.01), (
        "those before it ended sooner than was thought"
    )


@pytest.mark.parametrize(("due_in", "waits"), [(None, False), (5.0, False), (0.0, True), (-5.0, False)])
def test_a_kernel_is_looked_at_and_waited_for_only_where_it_is_about_to_end(
    peer: Peer, reader: Reader, monkeypatch: pytest.MonkeyPatch, due_in: float | None, waits: bool
) -> None:
    for name in ("_NEAR_S", "_PAST_S"):
        monkeypatch.setattr(direct_cuda_lane, name, 2.0)
    lane, reader.copier.held = reader.lane(peer.metadata()), True
    transfer = lane.submit("p", reader.all(peer))
    transfer.due = time.monotonic() + due_in if due_in is not None else 0.0
    assert lane.poll(transfer) is State.PENDING
    assert reader.copier.flights[0].waited is waits
    reader.copier.let_go()
    assert lane.poll(transfer) is State.DONE


def test_memory_is_mapped_once_for_all_lanes_and_unmapped_with_the_last(peer: Peer, reader: Reader) -> None:
    one, other = reader.lane(peer.metadata()), reader.lane(peer.metadata())
    assert (reader.driver.opened, len(reader.mappings)) == (1, 1)
    one.close()
    assert len(reader.driver.open) == 1
    assert other.poll(other.submit("p", reader.all(peer))) is State.DONE
    other.close()
    assert not reader.driver.open
    assert len(reader.mappings) == 0


def test_close_waits_for_the_kernel_before_it_unmaps(
    peer: Peer, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.copier.held = True
    lane = reader.lane(peer.metadata())
    transfer = lane.submit("p", reader.all(peer))
    monkeypatch.setattr(direct_cuda_lane, "CLOSE_S", 0.01)
    with pytest.raises(BackendError, match=r"a kernel of lane 'one' still runs after 0.01 s"):
        lane.close()
    assert not transfer.reason
    assert reader.driver.open, "what a kernel reads stays mapped"
    with pytest.raises(TransferRefused, match="closed"):
        lane.submit("p", reader.all(peer))
    reader.copier.let_go()
    lane.close()
    assert transfer.state is State.FAILED
    assert "closed before the transfer ended" in transfer.reason
    assert not reader.driver.open


def test_a_copy_ends_well_though_its_source_is_killed_and_no_new_one_begins(
    peer: Peer, reader: Reader
) -> None:
    reader.copier.held = True
    lane = reader.lane(peer.metadata())
    transfer = lane.submit("p", reader.all(peer))
    peer.worker.kill()
    reader.copier.let_go()
    assert lane.poll(transfer) is State.DONE
    assert (reader.buffer == pattern(SIZE)).all()
    with pytest.raises(WorkerUnreachable, match="process is gone"):
        lane.submit("p", reader.all(peer))
    with pytest.raises(WorkerUnreachable, match=f"process {peer.worker.process.pid} of the peer is gone"):
        reader.lane(peer.metadata())


def test_a_home_that_is_closed_fails_what_is_read_from_it(peer: Peer, reader: Reader) -> None:
    reader.copier.held = True
    lane = reader.lane(peer.metadata())
    transfer = lane.submit("p", reader.all(peer))
    peer.worker.order("close")
    reader.copier.let_go()
    assert lane.poll(transfer) is State.FAILED
    assert f"the backend in process {peer.worker.process.pid} of the peer was closed" in transfer.reason
    with pytest.raises(WorkerUnreachable, match="was closed"):
        lane.submit_selection("p", reader.selection(peer))


def test_a_device_that_fails_fails_the_transfer_and_lets_the_lane_close(peer: Peer, reader: Reader) -> None:
    reader.copier.held = True
    lane = reader.lane(peer.metadata())
    transfers = [lane.submit("p", reader.all(peer)) for _ in range(2)]
    for flight in reader.copier.flights:
        flight.broken = "CUDA error: an illegal memory access was encountered"
    assert lane.poll(transfers[0]) is State.FAILED
    assert "illegal memory access" in transfers[0].reason
    lane.close()
    assert transfers[1].state is State.FAILED


def test_a_launch_that_is_refused_moves_nothing(peer: Peer, reader: Reader) -> None:
    lane = reader.lane(peer.metadata())
    reader.copier.refuses = "CUDA error: out of memory"
    with pytest.raises(BackendError, match="the device would not take the copy: CUDA error: out of memory"):
        lane.submit("p", reader.all(peer))
    assert not reader.buffer.any()


def test_it_only_reads_what_is_registered_from_whom_it_knows(peer: Peer, reader: Reader) -> None:
    lane, rows = reader.lane(peer.metadata()), reader.all(peer)
    with pytest.raises(TransferRefused, match="only reads"):
        lane.submit("p", rows, "write")
    with pytest.raises(TransferRefused, match="peer 'q' was not added"):
        lane.submit("q", rows)
    with pytest.raises(TransferRefused, match=r"remote descriptor 0, .* is not registered"):
        lane.submit("p", Descriptors(rows.local, rows.remote + 1, rows.length))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ipc_namespace": 7}, r"the peer is in IPC namespace 7 and this worker in \d+"),
        ({"process": {"boot": "another"}}, "the peer is on another host: boot id another there"),
        ({"process": {"pid_namespace": 7}}, "the peer is in pid namespace 7"),
        ({"process": {"started": 7}}, "is not the peer any more"),
    ],
)
def test_a_peer_that_cannot_be_read_is_refused_with_the_reason(
    peer: Peer, reader: Reader, change: dict[str, Any], why: str
) -> None:
    with pytest.raises(WorkerUnreachable, match=why) as refused:
        reader.lane(peer.metadata(**change))
    assert refused.value.hint
    assert not reader.driver.opened


def test_a_gpu_without_access_to_the_peers_is_refused_and_one_that_is_not_visible_is_tried(
    peer: Peer, reader: Reader
) -> None:
    reader.driver.unreachable = {1}
    with pytest.raises(
        WorkerUnreachable, match="GPU gpu-a of this worker has no access to the memory of GPU gpu-b"
    ):
        reader.lane(peer.metadata())
    assert reader.driver.opened == 0
    reader.lane(peer.metadata(device="gpu-hidden")).close()
    assert reader.driver.opened == 1
    reader.driver.refuses, reader.driver.unreachable = "invalid device ordinal", set()
    with pytest.raises(
        WorkerUnreachable, match=r"on GPU gpu-b cannot be mapped: cuIpcOpenMemHandle_v2: invalid device"
    ):
        reader.lane(peer.metadata())


def test_host_memory_and_device_memory_do_not_meet(peer: Peer, reader: Reader) -> None:
    with pytest.raises(WorkerUnreachable, match="the peer's memory is on its CPU and this worker's on a GPU"):
        reader.lane(peer.worker.metadata)
    backend, buffer = DirectBackend("host", DirectOptions()), np.zeros(4096, np.uint8)
    backend.register([Region(buffer.ctypes.data, 4096)])
    try:
        with pytest.raises(
            WorkerUnreachable, match="the peer's memory is on a GPU and this worker's on its CPU"
        ):
            backend.lane("one").add("p", peer.metadata())
    finally:
        backend.close()


def test_metadata_of_another_release_is_refused(peer: Peer, reader: Reader) -> None:
    older = pack(replace(unpack(peer.metadata(), backend="direct"), version="1"))
    with pytest.raises(PeerMetadataError, match="version 1 at the peer and 2 here"):
        reader.lane(older)


def test_a_home_on_a_system_without_cuda_says_what_is_missing() -> None:
    backend = DirectBackend("gpu", DirectOptions())
    try:
        with pytest.raises(RegistrationError, match=r"memory of cuda:9 cannot be registered: "):
            backend.register([Region(1 << 40, 4096, "cuda:9")])
        with pytest.raises(RegistrationError, match="memory of cpu and cuda:0: one device only"):
            backend.register([Region(1 << 40, 4096, "cuda:0"), Region(1 << 41, 4096)])
        with pytest.raises(
            RegistrationError, match="memory of xpu:0 cannot be registered: cpu and cuda only"
        ):
            backend.register([Region(1 << 40, 4096, "xpu:0")])
    finally:
        backend.close()


@pytest.mark.parametrize("value", [0, True, "many", 5000])
def test_the_number_of_thread_blocks_is_a_number(value: object) -> None:
    with pytest.raises(BackendError, match=r"option ctas is .*; it is 1 to 4096"):
        open_backend("x", options={"ctas": value})


BASE = 1 << 40


def test_allocations_are_shared_once_by_their_handles() -> None:
    device: Any = MadeUpDriver(allocations=[Region(BASE, 1000), Region(BASE + 1000, 5000)])
    regions = [
        Region(BASE + 100, 200, "cuda:0"),
        Region(BASE + 500, 700, "cuda:0"),
        Region(BASE + 300, 100, "cuda:0"),
    ]
    memory = share(device, regions)
    assert [(s.address, s.length) for s in memory] == [(BASE, 1000), (BASE + 1000, 5000)]
    assert memory[0].handle == f"handle of {BASE:#x}".encode()
    pieces, places = stretches(regions, memory, [7000, 90000])
    assert [(p.address - BASE, p.length) for p in pieces] == [(100, 300), (500, 500), (1000, 200)]
    assert places == [7100, 7500, 90000]


def test_memory_without_handles_goes_by_descriptors_where_its_maker_allowed_it() -> None:
    parts = [Region(BASE + at, 100) for at in range(0, 1000, 100)]
    device: Any = MadeUpDriver(allocations=parts, kind="descriptor")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    (shared,) = share(device, [Region(BASE + 250, 400, "cuda:0")])
    assert (shared.address - BASE, shared.length, len(shared.parts), shared.handle) == (200, 500, 5, b"")
    unshare([shared])
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_memory_that_cannot_be_shared_is_refused_with_the_cure() -> None:
    device: Any = MadeUpDriver(allocations=[Region(BASE, 1000)], kind="none")
    with pytest.raises(RegistrationError, match="made without a handle") as refused:
        share(device, [Region(BASE, 10, "cuda:0")])
    assert "expandable_segments" in refused.value.hint
    many: Any = MadeUpDriver(
        allocations=[Region(BASE + at, 1) for at in range(MOST_PARTS + 10)], kind="descriptor"
    )
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(RegistrationError, match=f"more than {MOST_PARTS} parts"):
        share(many, [Region(BASE, MOST_PARTS + 5, "cuda:0")])
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    device.allocations = []
    with pytest.raises(RegistrationError, match="invalid argument"):
        share(device, [Region(BASE, 10, "cuda:0")])
