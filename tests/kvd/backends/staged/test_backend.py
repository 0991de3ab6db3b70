"""Staged: peers read a copy in host memory, and what an engine reads reaches KV memory by way of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvd.backends.contract import Lane, State, Transfer
from kvd.backends.errors import BackendError, PeerMetadataError, RegistrationError, TransferRefused
from kvd.backends.memory import Faults
from kvd.backends.staged import backend as staged
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors

SIZE = 1 << 16


class Worker:
    """KV memory of two spans apart, and a staged backend over it."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.memory = np.random.default_rng(seed).integers(1, 255, 2 * SIZE + 4096, dtype=np.uint8)
        self.base = int(self.memory.ctypes.data)
        options = {"engine": "memory", "engine_options": {"faults": faults}}
        self.backend = staged.open_backend("worker", options=options)
        second = self.base + SIZE + 4096
        self.backend.register([Region(self.base, SIZE), Region(second, SIZE)])

    def stage(self, *pieces: tuple[int, int]) -> None:
        at, length = np.array(pieces, np.int64).T
        self.backend.stage(Descriptors(at + self.base, at + self.base, length))


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def here(faults: Faults) -> Iterator[Worker]:
    worker = Worker(1, faults)
    yield worker
    worker.backend.close()


@pytest.fixture
def peer() -> Iterator[Worker]:
    worker = Worker(2, Faults())
    yield worker
    worker.backend.close()


@pytest.fixture
def lane(here: Worker, peer: Worker) -> Lane:
    lane = here.backend.lane("peer")
    lane.add("p", peer.backend.metadata())
    return lane


def rows(here: Worker, peer: Worker, *pieces: tuple[int, int, int]) -> Descriptors:
    mine, theirs, length = np.array(pieces, np.int64).T
    return Descriptors(mine + here.base, theirs + peer.base, length)


def finish(lane: Lane, transfer: Transfer) -> State:
    while lane.poll(transfer) is State.PENDING:
        pass
    return transfer.state


def test_peers_read_what_was_put_out_and_not_what_came_later(here: Worker, peer: Worker, lane: Lane) -> None:
    there = peer.memory[100:300].copy()
    peer.stage((100, 200))
    peer.memory[100:300] = 0

    assert finish(lane, lane.submit("p", rows(here, peer, (40, 100, 200)))) is State.DONE

    assert (here.memory[40:240] == there).all()


def test_each_span_has_a_mirror_of_its_own(here: Worker, peer: Worker, lane: Lane) -> None:
    second = SIZE + 4096
    peer.stage((0, SIZE), (second, SIZE))
    before = here.memory.copy()

    read = rows(here, peer, (second + 5, 7, 1000), (3, second + 64000, 1536), (9000, 500, 1))
    assert finish(lane, lane.submit("p", read)) is State.DONE

    before[second + 5 : second + 1005] = peer.memory[7:1007]
    before[3:1539] = peer.memory[second + 64000 : second + 65536]
    before[9000] = peer.memory[500]
    assert (here.memory == before).all()


def test_kv_memory_is_not_touched_before_a_transfer_is_whole(
    here: Worker, peer: Worker, lane: Lane, faults: Faults
) -> None:
    peer.stage((0, SIZE))
    before = here.memory.copy()
    faults.fail_after[0] = 1

    transfer = lane.submit("p", rows(here, peer, (0, 0, 100), (1000, 1000, 100)))

    assert finish(lane, transfer) is State.FAILED
    assert "fail half-way" in transfer.reason
    assert (here.memory == before).all()


def test_what_lands_late_lands_in_the_mirror_only(
    here: Worker, peer: Worker, lane: Lane, faults: Faults
) -> None:
    peer.stage((0, SIZE))
    before = here.memory.copy()
    faults.late.add(0)

    assert finish(lane, lane.submit("p", rows(here, peer, (0, 0, SIZE)))) is State.FAILED
    faults.release(0)  # before the lane is closed, so the bytes land

    assert (here.memory == before).all()


def test_a_lane_that_is_closed_takes_nothing_out_of_the_mirror(
    here: Worker, peer: Worker, lane: Lane, faults: Faults
) -> None:
    peer.stage((0, SIZE))
    before = here.memory.copy()
    faults.hold.add(0)
    transfer = lane.submit("p", rows(here, peer, (0, 0, SIZE)))
    assert lane.poll(transfer) is State.PENDING

    lane.close()
    faults.release(0)

    assert lane.poll(transfer) is State.FAILED
    assert "closed" in transfer.reason
    assert (here.memory == before).all()


def test_what_is_here_goes_on_while_more_is_posted(here: Worker, peer: Worker, lane: Lane) -> None:
    peer.stage((0, SIZE))
    lane.submit("p", rows(here, peer, (0, 0, 100)))
    assert not (here.memory[:100] == peer.memory[:100]).all()

    lane.submit("p", rows(here, peer, (1000, 1000, 100)))

    assert (here.memory[:100] == peer.memory[:100]).all()


def test_only_registered_memory_is_put_out(here: Worker) -> None:
    with pytest.raises(TransferRefused, match=r"local descriptor 1, 4097 bytes .* is not registered"):
        here.stage((0, 1), (SIZE - 1, 4097))


def test_both_sides_need_the_same_engine(here: Worker, peer: Worker) -> None:
    pytest.importorskip("nixl", exc_type=ImportError)
    other = staged.open_backend("worker", options={"engine": "nixl"})
    try:
        other.register([Region(peer.base, SIZE)])
        with pytest.raises(PeerMetadataError, match="is nixl at the peer and memory here"):
            here.backend.lane("peer").add("p", other.metadata())
    finally:
        other.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"engine": "direct"}, "engine is 'direct', which is no transfer engine"),
        ({"engine": 3}, "engine is 3; it is a name"),
        ({"engine_options": []}, r"engine_options is \[\]; it is an object"),
        ({"ctas": 0}, "ctas is 0; it is 1 to 4096"),
        ({"ctas": True}, "ctas is True; it is 1 to 4096"),
        ({"colour": 1}, "unknown option colour for staged; known are engine, engine_options, ctas, memfd"),
    ],
)
def test_options_are_checked(options: dict[str, Any], says: str) -> None:
    with pytest.raises(BackendError, match=says):
        staged.open_backend("w", options=options)


def test_memory_that_the_host_has_not_is_an_error_with_its_size() -> None:
    backend = staged.open_backend("w", options={"engine": "memory"})
    with pytest.raises(RegistrationError, match=f"mirror of {1 << 60} bytes") as raised:
        backend.register([Region(4096, 1 << 60)])
    assert "as much locked host memory" in raised.value.hint
    backend.close()


def test_one_device_only() -> None:
    backend = staged.open_backend("w", options={"engine": "memory"})
    with pytest.raises(RegistrationError, match="memory of cpu and cuda:0: one device only"):
        backend.register([Region(4096, 4096), Region(1 << 20, 4096, "cuda:0")])
    backend.close()
