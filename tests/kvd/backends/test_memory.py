"""The memory backend's faults happen exactly where the script says."""

from collections.abc import Iterator

import numpy as np
import pytest

from kvd.backends.contract import Lane, State, orders_streams
from kvd.backends.memory import Faults, open_backend
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from tests.support.raising import raises

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Bench:
    def __init__(self) -> None:
        self.faults = Faults()
        self.source: Bytes = np.full(64, 7, np.uint8)
        self.target: Bytes = np.zeros(64, np.uint8)
        self.peer, self.me = open_backend("p", options={}), open_backend("m", options={"faults": self.faults})
        self.peer.register([Region(self.source.ctypes.data, 64)])
        self.me.register([Region(self.target.ctypes.data, 64)])
        self.lane: Lane = self.me.lane("p")
        self.lane.add("p", self.peer.metadata())

    def rows(self, count: int = 1) -> Descriptors:
        at = np.arange(count, dtype=np.int64) * 8
        return Descriptors(at + self.target.ctypes.data, at + self.source.ctypes.data, np.full(count, 8))


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.me.close()
    made.peer.close()


def test_hold(bench: Bench) -> None:
    bench.faults.hold = {0}
    transfer = bench.lane.submit("p", bench.rows())
    assert bench.lane.poll(transfer) is State.PENDING
    assert not bench.target.any()
    bench.faults.release(0)
    assert bench.lane.poll(transfer) is State.DONE
    assert bench.target.sum() == 56


def test_what_is_not_held_is_there_for_the_stream_behind_it(bench: Bench) -> None:
    bench.faults.hold = {0}
    held, other = (bench.lane.submit("p", bench.rows()) for _ in range(2))
    assert orders_streams(bench.lane)
    bench.lane.precede(held, 0)
    assert held.state is State.PENDING
    assert not bench.target.any()
    bench.lane.precede(other, 0)
    assert other.state is State.DONE
    assert bench.target.sum() == 56


def test_refuse_the_second(bench: Bench) -> None:
    bench.faults.refuse = {1}
    bench.lane.submit("p", bench.rows())
    with raises("KVD-BACKEND-REFUSED", match="submit 1"):
        bench.lane.submit("p", bench.rows())
    bench.lane.submit("p", bench.rows())


def test_fail_after_two_descriptors(bench: Bench) -> None:
    bench.faults.fail_after = {0: 2}
    transfer = bench.lane.submit("p", bench.rows(5))
    assert bench.lane.poll(transfer) is State.FAILED
    assert transfer.reason
    assert np.count_nonzero(bench.target) == 16


@pytest.mark.parametrize("close", [False, True])
def test_late_bytes_land_unless_the_lane_was_closed(bench: Bench, *, close: bool) -> None:
    bench.faults.late = {0}
    transfer = bench.lane.submit("p", bench.rows(4))
    assert transfer.state is State.FAILED
    if close:
        bench.lane.close()
    bench.faults.release(0)
    assert np.count_nonzero(bench.target) == (0 if close else 32)


def test_a_vanished_peer_fails_what_was_pending(bench: Bench) -> None:
    transfer = bench.lane.submit("p", bench.rows())
    bench.peer.close()
    assert bench.lane.poll(transfer) is State.FAILED
    assert "was closed" in transfer.reason


class Written:
    """A backend that is written to and one that writes, with the faults on the writer's side."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.source: Bytes = np.full(64, 7, np.uint8)
        self.target: Bytes = np.zeros(64, np.uint8)
        self.owner, self.writer = (
            open_backend("o", options={}),
            open_backend("w", options={"faults": self.faults}),
        )
        self.owner.register([Region(self.target.ctypes.data, 64)])
        self.writer.register([Region(self.source.ctypes.data, 64)])
        self.window, self.lane = self.owner.window("w"), self.writer.lane("o")
        self.lane.add("o", self.window.metadata())
        self.rows = Descriptors(
            *(np.array([v], np.int64) for v in (self.source.ctypes.data, self.target.ctypes.data, 32))
        )


@pytest.fixture
def written() -> Iterator[Written]:
    made = Written()
    yield made
    made.writer.close()
    made.owner.close()


def test_a_held_write_fails_when_its_window_goes(written: Written) -> None:
    written.faults.hold = {0}
    transfer = written.lane.submit("o", written.rows, "write")
    assert written.lane.poll(transfer) is State.PENDING
    written.window.close()
    written.faults.release(0)
    assert written.lane.poll(transfer) is State.FAILED
    assert not written.target.any()


@pytest.mark.parametrize(("closed", "lands"), [("nothing", 32), ("lane", 32), ("window", 0)])
def test_late_writes_land_until_the_window_is_closed(written: Written, closed: str, lands: int) -> None:
    """As with NIXL over tcp: what a closed lane had sent is on its way, and only the target can stop it."""
    written.faults.late = {0}
    assert written.lane.submit("o", written.rows, "write").state is State.FAILED
    if closed != "nothing":
        getattr(written, closed).close()
    written.faults.release(0)
    assert np.count_nonzero(written.target) == lands
