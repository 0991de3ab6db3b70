"""Auto: one choice a lane, the reason told once, and every transfer named for what moved it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvd.backends.auto import backend as auto
from kvd.backends.auto.lane import AutoLane
from kvd.backends.auto.metadata import read_both, write_both
from kvd.backends.contract import Lane, State, Transfer, orders_streams, traits_of
from kvd.backends.direct import backend as direct
from kvd.backends.direct.card import Card, CudaCard, SharedStretch
from kvd.backends.direct.cuda.lane import CudaLane
from kvd.backends.direct.cuda.memory import Mappings, ipc_namespace
from kvd.backends.direct.host import copy as direct_copy
from kvd.backends.direct.host import lane as direct_lane
from kvd.backends.direct.process import Process
from kvd.backends.envelope import pack, unpack
from kvd.backends.errors import BackendError, BackendUnavailable, PeerMetadataError, WorkerUnreachable
from kvd.backends.memory import Faults, MemoryBackend, MemoryLane
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import Grid, Selection
from tests.support.direct_gpu import MadeUpCopier, MadeUpDriver

SIZE = 1 << 20
ENGINE = {"engine": "memory"}


def finish(lane: Lane, transfer: Transfer) -> State:
    while lane.poll(transfer) is State.PENDING:
        pass
    return transfer.state


@dataclass
class Worker:
    memory: Any
    backend: auto.AutoBackend

    @property
    def metadata(self) -> bytes:
        return self.backend.metadata()

    def elsewhere(self) -> bytes:
        """Its metadata, were it on another host."""
        both = read_both(self.metadata)
        envelope = unpack(both.direct_metadata, backend="direct")
        card = msgspec.json.decode(envelope.blob, type=Card)
        moved = msgspec.structs.replace(card, process=msgspec.structs.replace(card.process, boot="another"))
        blob = pack(replace(envelope, blob=msgspec.json.encode(moved)))
        return write_both("worker", msgspec.structs.replace(both, direct_metadata=blob))

    def told(self, **changes: Any) -> bytes:
        return write_both("worker", msgspec.structs.replace(read_both(self.metadata), **changes))


Make = Callable[..., Worker]


@pytest.fixture
def worker() -> Iterator[Make]:
    made: list[Worker] = []

    def make(*, device: str = "cpu", **options: Any) -> Worker:
        memory = (np.arange(SIZE) % 251 + len(made)).astype(np.uint8)
        backend = auto.open_backend("worker", options={**ENGINE, **options})
        backend.register([Region(memory.ctypes.data, SIZE, device)])
        made.append(Worker(memory, backend))
        return made[-1]

    yield make
    for one in made:
        one.backend.close()


def rows(here: Worker, there: Worker) -> Descriptors:
    columns = (here.memory.ctypes.data, there.memory.ctypes.data, SIZE)
    return Descriptors(*(np.array([value], np.int64) for value in columns))


def read(lane: AutoLane, here: Worker, there: Worker, peer: str = "tp0") -> str:
    """Read all and give the backend that the transfer was named for."""
    here.memory[:] = 0
    transfer = lane.submit(peer, rows(here, there))
    assert finish(lane, transfer) is State.DONE
    assert (here.memory == there.memory).all()
    return transfer.backend


def test_on_one_host_it_reads_directly(worker: Make, caplog: pytest.LogCaptureFixture) -> None:
    me, peer = worker(), worker()
    lane = me.backend.lane("engine")
    lane.add("tp0", peer.metadata)
    assert lane.uses == "direct"
    assert read(lane, me, peer) == "direct"
    assert not caplog.text


def test_to_another_host_it_takes_the_engine_and_says_why_once(
    worker: Make, caplog: pytest.LogCaptureFixture
) -> None:
    me, peer = worker(), worker()
    for _ in range(2):
        lane = me.backend.lane("engine")
        lane.add("tp0", peer.elsewhere())
        assert lane.uses == "memory"
        assert read(lane, me, peer) == "memory"
        lane.close()
    assert [record.getMessage().count("boot id another there") for record in caplog.records] == [1]


def test_a_lane_has_the_traits_of_what_moves_its_bytes(worker: Make) -> None:
    me, near, far = worker(), worker(), worker()
    lane = me.backend.lane("engine")
    lane.add("tp0", near.metadata)
    assert traits_of(me.backend, lane) == direct.HOST_TRAITS
    lane.add("tp1", far.elsewhere())
    assert traits_of(me.backend, lane) == MemoryBackend.traits
    assert traits_of(me.backend, None) == me.backend.traits


def test_streams_are_put_behind_what_the_chosen_lane_moves(worker: Make) -> None:
    me, near, far = worker(), worker(), worker()
    for metadata, there, uses in ((near.metadata, near, "direct"), (far.elsewhere(), far, "memory")):
        lane = me.backend.lane("engine")
        lane.add("tp0", metadata)
        assert orders_streams(lane)
        me.memory[:] = 0
        transfer = lane.submit("tp0", rows(me, there))
        lane.precede(transfer, 0)
        assert (transfer.state, transfer.backend) == (State.DONE, uses)
        assert (me.memory == there.memory).all()


def test_no_stream_is_ordered_where_the_chosen_lane_cannot(
    worker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(MemoryLane, "precede")  # as an engine whose transfers the device knows nothing of
    me, near, far = worker(), worker(), worker()
    lane = me.backend.lane("engine")
    lane.add("tp0", near.metadata)
    assert orders_streams(lane)
    lane.add("tp1", far.elsewhere())
    assert not orders_streams(lane)


@dataclass
class MadeUpDevice:
    """Takes the place of a GPU: shares what is host memory, of which lanes copy as a kernel would."""

    card: CudaCard
    copier: MadeUpCopier
    driver: Any

    @classmethod
    def open(cls, _name: str, regions: Sequence[Region], _ctas: int) -> MadeUpDevice:
        shared = tuple(SharedStretch(region.address, region.length) for region in regions)
        return cls(CudaCard("gpu-a", ipc_namespace(), shared), MadeUpCopier(), MadeUpDriver())

    def lane(self, name: str, here: Process, regions: Sequence[Region], closed: Any) -> CudaLane:
        return CudaLane(name, here, regions, self.driver, Mappings(self.driver), self.copier, closed)

    def close(self) -> None:
        pass


def test_on_gpus_it_is_the_kernel_on_one_host_and_the_engine_elsewhere(
    worker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = MemoryBackend.register

    def as_host_memory(backend: MemoryBackend, regions: Sequence[Region]) -> None:
        register(backend, [Region(region.address, region.length) for region in regions])

    monkeypatch.setattr(MemoryBackend, "register", as_host_memory)
    monkeypatch.setattr(direct, "open_device", MadeUpDevice.open)
    me, peer = worker(device="cuda:0"), worker(device="cuda:0")
    lane = me.backend.lane("engine")
    lane.add("tp0", peer.metadata)
    assert read(lane, me, peer) == "direct"
    assert traits_of(me.backend, lane) == direct.CUDA_TRAITS
    other = me.backend.lane("another engine")
    other.add("tp0", peer.elsewhere())
    assert other.uses == "memory"
    assert traits_of(me.backend, other) == MemoryBackend.traits


def test_one_worker_elsewhere_turns_the_whole_lane_to_the_engine(worker: Make) -> None:
    me, near, far = worker(), worker(), worker()
    lane = me.backend.lane("engine")
    lane.add("tp0", near.metadata)
    assert lane.uses == "direct"
    lane.add("tp1", far.elsewhere())
    assert read(lane, me, near, "tp0") == read(lane, me, far, "tp1") == "memory"


def test_what_was_begun_directly_ends_so(worker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_lane, "SLICE_S", 0.0)
    monkeypatch.setattr(direct_copy, "CALL_BYTES", 4096)
    me, near, far = worker(), worker(), worker()
    lane = me.backend.lane("engine")
    lane.add("tp0", near.metadata)
    me.memory[:] = 0
    transfer = lane.submit("tp0", rows(me, near))
    lane.add("tp1", far.elsewhere())
    assert finish(lane, transfer) is State.DONE
    assert transfer.backend == "direct"
    assert (me.memory == near.memory).all()


def test_a_transfer_that_ends_as_its_peer_is_added_anew_is_let_go(worker: Make) -> None:
    faults = Faults(hold={0})
    me, far = worker(engine_options={"faults": faults}), worker()
    lane = me.backend.lane("engine")
    lane.add("tp0", far.elsewhere())
    transfer = lane.submit("tp0", rows(me, far))
    transfer.end("peer tp0 was added anew")
    assert lane.poll(transfer) is State.FAILED
    assert not _held_by(lane, transfer)


def _held_by(lane: AutoLane, transfer: Transfer) -> bool:
    return any(transfer in kept.values() for kept in vars(lane).values() if isinstance(kept, dict))


def test_close_ends_transfers_of_both(worker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_lane, "SLICE_S", 0.0)
    monkeypatch.setattr(direct_copy, "CALL_BYTES", 4096)
    faults = Faults(hold={0})
    me, near, far = worker(engine_options={"faults": faults}), worker(), worker()
    lane = me.backend.lane("engine")
    lane.add("tp0", near.metadata)
    first = lane.submit("tp0", rows(me, near))
    lane.add("tp1", far.elsewhere())
    second = lane.submit("tp1", rows(me, far))
    lane.close()
    me.memory[:] = 0
    faults.release(0)
    assert lane.poll(first) is lane.poll(second) is State.FAILED
    assert not me.memory.any()


def test_after_a_failed_direct_read_the_next_lane_takes_the_engine(
    worker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    me, peer = worker(), worker()
    lane = me.backend.lane("engine")
    lane.add("tp0", peer.metadata)
    with monkeypatch.context() as broken:
        broken.setattr(direct_lane, "SLICE_S", 0.0)
        broken.setattr(direct_copy, "CALL_BYTES", 4096)
        transfer = lane.submit("tp0", rows(me, peer))
        broken.setattr(direct_copy, "read_rows", _refusing)
        assert finish(lane, transfer) is State.FAILED
    lane.close()
    lane = me.backend.lane("engine")
    lane.add("tp0", peer.metadata)
    assert read(lane, me, peer) == "memory"


def _refusing(*_: object) -> int:
    raise PermissionError(1, "Operation not permitted")


def test_picks_go_by_number_where_the_engine_takes_them(worker: Make) -> None:
    me, peer = worker(), worker()
    one, page = np.array([0], np.int64), np.array([4096], np.int64)
    grid = Grid(one + me.memory.ctypes.data, one + peer.memory.ctypes.data, page, page, page, 256, 256)
    cells = np.arange(256, dtype=np.int32)
    for metadata, uses in ((peer.metadata, "direct"), (peer.elsewhere(), "memory")):
        lane = me.backend.lane("engine")
        lane.add("tp0", metadata)
        me.memory[:] = 0
        transfer = lane.submit_selection("tp0", Selection(grid, cells, cells[::-1].copy(), SIZE))
        assert finish(lane, transfer) is State.DONE
        assert transfer.backend == uses
        assert (me.memory.reshape(256, -1) == peer.memory.reshape(256, -1)[::-1]).all()


def test_without_its_engine_it_is_direct_only(worker: Make, caplog: pytest.LogCaptureFixture) -> None:
    me, peer = worker(engine="no-such-engine"), worker(engine="no-such-engine")
    assert "no backend 'no-such-engine'" in caplog.text
    lane = me.backend.lane("engine")
    lane.add("tp0", peer.metadata)
    assert read(lane, me, peer) == "direct"
    with pytest.raises(
        WorkerUnreachable, match=r"boot id another.*no engine here: no backend 'no-such-engine'"
    ):
        me.backend.lane("engine").add("tp0", peer.elsewhere())


def test_where_nothing_can_be_read_directly_it_is_the_engine_alone(
    worker: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(direct, "read_bytes", _refusing)
    me, peer = worker(), worker()
    assert "a process cannot read another's memory on this system" in caplog.text
    lane = me.backend.lane("engine")
    lane.add("tp0", peer.metadata)
    assert read(lane, me, peer) == "memory"


def test_what_the_peer_lacks_is_told_in_its_words(worker: Make) -> None:
    me, peer = worker(), worker()
    with pytest.raises(PeerMetadataError, match=r"at the peer: no /proc.*NIXL is not installed"):
        me.backend.lane("x").add("tp0", peer.told(no_direct="no /proc", no_engine="NIXL is not installed"))
    with pytest.raises(PeerMetadataError, match="its engine is mooncake and the one here memory"):
        me.backend.lane("x").add("tp0", peer.told(no_direct="no /proc", engine="mooncake"))


def test_neither_way_is_an_error_with_both_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> None:
        raise BackendUnavailable("no /proc")

    monkeypatch.setattr(direct, "DirectBackend", closed)
    with pytest.raises(BackendUnavailable, match=r"no /proc; no backend 'no-such-engine'"):
        auto.open_backend("x", options={"engine": "no-such-engine"})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"engine": "direct"}, "no transfer engine"),
        ({"engine": 3}, "it is a name"),
        ({"engine_options": []}, "it is an object"),
        ({"direct_options": {"colour": True}}, "colour"),
        ({"colour": 1}, "known are engine, engine_options, direct_options"),
    ],
)
def test_options_are_read_strictly(options: dict[str, Any], says: str) -> None:
    with pytest.raises(BackendError, match=says):
        auto.open_backend("x", options=options)


def test_settings_are_read_without_importing_an_engine() -> None:
    script = (
        "import sys, kvd.backends.auto.backend; assert not {'nixl', 'mooncake', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=Path(__file__).parents[4])
