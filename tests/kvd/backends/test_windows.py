"""What every window must do, asked in one process of each backend that has windows."""

from collections.abc import Iterator

import numpy as np
import pytest

from kvd.backends.contract import Lane, SelectingLane, State, Transfer, Window, WindowBackend
from kvd.backends.errors import TransferRefused, WorkerUnreachable
from kvd.backends.registry import open_backend
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import Grid, Selection
from tests.support.raising import raises

SIZE = 1 << 20
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Sides:
    """An engine that is written to, and one that writes."""

    def __init__(self, kind: str) -> None:
        self.source: Bytes = (np.arange(SIZE, dtype=np.int64) * 31 % 251 + 1).astype(np.uint8)
        self.target: Bytes = np.zeros(SIZE, np.uint8)
        self.owner, self.writer = self.backend(kind, self.target), self.backend(kind, self.source)
        self.lane: Lane = self.writer.lane("owner")

    @staticmethod
    def backend(kind: str, memory: Bytes) -> WindowBackend:
        backend = open_backend(kind, "worker", {})
        assert isinstance(backend, WindowBackend)
        backend.register([Region(memory.ctypes.data, SIZE)])
        assert backend.traits.lands
        return backend

    def window(self, peer: str) -> Window:
        window = self.owner.window(peer)
        self.lane.add(peer, window.metadata())
        return window

    def rows(self, *triples: tuple[int, int, int]) -> Descriptors:
        local, remote, length = np.array(triples, np.int64).reshape(-1, 3).T
        return Descriptors(local + self.source.ctypes.data, remote + self.target.ctypes.data, length)

    def finish(self, transfer: Transfer, *served: Window) -> State:
        for _ in range(1_000_000):
            for window in served:
                window.progress()
            if self.lane.poll(transfer) is not State.PENDING:
                break
        return transfer.state


@pytest.fixture(params=["memory", "nixl"])
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    if request.param == "nixl":
        pytest.importorskip("nixl", exc_type=ImportError)
    made = Sides(request.param)
    yield made
    made.writer.close()
    made.owner.close()


def test_writes_exactly_the_named_bytes(sides: Sides) -> None:
    window = sides.window("p")
    transfer = sides.lane.submit("p", sides.rows((7, 4001, 1), (100, 50, 333), (8, 70000, 65537)), "write")
    assert sides.finish(transfer, window) is State.DONE
    image = np.zeros(SIZE, np.uint8)
    for local, remote, length in ((7, 4001, 1), (100, 50, 333), (8, 70000, 65537)):
        image[remote : remote + length] = sides.source[local : local + length]
    assert (sides.target == image).all()


def test_picks_write_the_cells_of_a_grid(sides: Sides) -> None:
    window, lane = sides.window("p"), sides.lane
    assert isinstance(lane, SelectingLane)
    start, end, length, here, there = (
        np.array([n], np.int64) for n in (sides.source.ctypes.data, sides.target.ctypes.data, 600, 1000, 3000)
    )
    grid = Grid(start, end, length, here, there, 40, 25)
    cells, others = np.array([39, 4], np.int32), np.array([0, 24], np.int32)
    transfer = lane.submit_selection("p", Selection(grid, cells, others, 1200), "write")
    assert sides.finish(transfer, window) is State.DONE
    image = np.zeros(SIZE, np.uint8)
    image[:600], image[72000:72600] = sides.source[39000:39600], sides.source[4000:4600]
    assert (sides.target == image).all()


def test_several_windows_of_one_worker_are_peers_of_one_lane(sides: Sides) -> None:
    both = sides.window("0#1"), sides.window("0#2")
    posted = [
        sides.lane.submit(peer, sides.rows((0, at, 100)), "write")
        for peer, at in (("0#1", 0), ("0#2", 500), ("0#1", 900))
    ]
    assert [sides.finish(transfer, *both) for transfer in posted] == [State.DONE] * 3
    assert np.count_nonzero(sides.target) == 300


def test_a_new_window_takes_the_place_of_a_closed_one(sides: Sides) -> None:
    sides.window("p").close()
    window = sides.window("p")
    assert sides.finish(sides.lane.submit("p", sides.rows((0, 0, 100)), "write"), window) is State.DONE
    assert (sides.target[:100] == sides.source[:100]).all()


def test_nothing_lands_through_a_closed_window_and_the_others_stay(sides: Sides) -> None:
    doomed, spared = sides.window("doomed"), sides.window("spared")
    under_way = sides.lane.submit("doomed", sides.rows((0, 0, SIZE // 2)), "write")
    doomed.close()
    doomed.close()
    sides.target[:] = 0
    after = sides.rows((SIZE // 2, SIZE // 2, 100))
    assert sides.finish(sides.lane.submit("spared", after, "write"), spared) is State.DONE
    try:
        late = sides.lane.submit("doomed", sides.rows((0, 0, 100)), "write")
    except (TransferRefused, WorkerUnreachable):
        pass
    else:
        assert sides.finish(late, spared) is State.FAILED
    assert sides.finish(under_way, spared) is not State.PENDING
    assert not sides.target[: SIZE // 2].any()
    assert np.count_nonzero(sides.target) == 100


def test_a_closed_window_says_so(sides: Sides) -> None:
    window = sides.owner.window("p")
    window.close()
    for call in (window.metadata, window.progress):
        with pytest.raises(TransferRefused, match="closed"):
            call()


def test_a_home_wants_memory_first_and_takes_its_windows_along(sides: Sides) -> None:
    bare = open_backend("memory" if "Memory" in type(sides.owner).__name__ else "nixl", "bare", {})
    assert isinstance(bare, WindowBackend)
    with raises("KVD-BACKEND-REGISTER"):
        bare.window("p")
    bare.close()
    window = sides.owner.window("p")
    sides.owner.close()
    with raises("KVD-BACKEND-REFUSED", match="closed"):
        window.metadata()
