"""What every backend must do, asked of each of them in one process."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvd.backends.contract import (
    Backend,
    Lane,
    Operation,
    SelectingLane,
    StagingBackend,
    State,
    Transfer,
)
from kvd.backends.envelope import Envelope, pack
from kvd.backends.errors import (
    BackendError,
    BackendUnavailable,
    PeerMetadataError,
    TransferRefused,
)
from kvd.backends.registry import ADAPTERS, open_backend
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import Grid, Selection
from tests.support.raising import raises

SIZE = 1 << 20
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Pair:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.source: Bytes = (np.arange(SIZE, dtype=np.int64) * 31 % 251 + 1).astype(np.uint8)
        self.target: Bytes = np.zeros(SIZE, np.uint8)
        self.peer = self.backend(self.source)
        self.me = self.backend(self.target)

    def backend(self, memory: Bytes) -> Backend:
        backend = open_backend(self.kind, "worker", {})
        backend.register([Region(memory.ctypes.data, SIZE)])
        if isinstance(backend, StagingBackend):
            whole = (np.array([value], np.int64) for value in (memory.ctypes.data, memory.ctypes.data, SIZE))
            backend.stage(Descriptors(*whole))
        return backend

    def lane(self) -> Lane:
        lane = self.me.lane("peer")
        lane.add("p", self.peer.metadata())
        return lane

    def rows(self, *triples: tuple[int, int, int]) -> Descriptors:
        local, remote, length = np.array(triples, np.int64).reshape(-1, 3).T
        return Descriptors(local + self.target.ctypes.data, remote + self.source.ctypes.data, length)


def finish(lane: Lane, transfer: Transfer) -> State:
    for _ in range(1_000_000):
        if lane.poll(transfer) is not State.PENDING:
            break
    return transfer.state


@pytest.fixture(params=list(ADAPTERS))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    try:
        made = Pair(request.param)
    except BackendUnavailable as missing:
        pytest.skip(missing.message)
    yield made
    made.me.close()
    made.peer.close()


def test_reads_exactly_the_named_bytes(pair: Pair) -> None:
    lane = pair.lane()
    transfer = lane.submit("p", pair.rows((7, 4001, 1), (100, 50, 333), (70000, 8, 65537)))
    assert finish(lane, transfer) is State.DONE
    image = np.zeros(SIZE, np.uint8)
    for local, remote, length in ((7, 4001, 1), (100, 50, 333), (70000, 8, 65537)):
        image[local : local + length] = pair.source[remote : remote + length]
    assert (pair.target == image).all()
    assert transfer.bytes == 65871
    assert transfer.ended >= transfer.posted > 0


def a_grid(pair: Pair) -> Grid:
    """Three rows that don't fill their stride, in pages of unequal size and number: 40 of 1000 bytes and 25 of 3000."""
    return Grid(
        np.array([0, 500, 700], np.int64) + pair.target.ctypes.data,
        np.array([2000, 100, 2900], np.int64) + pair.source.ctypes.data,
        np.array([400, 100, 97], np.int64),
        np.full(3, 1000, np.int64),
        np.full(3, 3000, np.int64),
        40,
        25,
    )


def some_selection(grid: Grid, blocks: int, seed: int) -> Selection:
    dice = np.random.default_rng(seed)
    mine, theirs = dice.permutation(40)[:blocks], dice.permutation(25)[:blocks]
    row = np.arange(3)[:, None]
    here, there = ((row * n + ids).ravel().astype(np.int32) for n, ids in ((40, mine), (25, theirs)))
    return Selection(grid, here, there, 597 * blocks)


@pytest.fixture
def _selecting(pair: Pair) -> None:
    """Only for a backend whose lanes take selections, as they say themselves."""
    if not isinstance(pair.lane(), SelectingLane):
        pytest.skip("its lanes take no selections")


takes_selections = pytest.mark.usefixtures("_selecting")


def test_backends_that_are_fast_by_selections_take_them(pair: Pair) -> None:
    """Else the tests of selections would be skipped for them."""
    if pair.kind in {"memory", "nixl", "direct"}:
        assert isinstance(pair.lane(), SelectingLane)


def picking(pair: Pair) -> SelectingLane:
    lane = pair.lane()
    assert isinstance(lane, SelectingLane)
    return lane


@takes_selections
@pytest.mark.parametrize("operation", ["read", "write"])
def test_picks_copy_the_bytes_that_descriptors_would(pair: Pair, operation: Operation) -> None:
    lane, grid = picking(pair), a_grid(pair)
    if operation == "write" and ADAPTERS[pair.kind].reads_only:
        with pytest.raises(TransferRefused, match="only reads"):
            lane.submit_selection("p", some_selection(grid, 1, 0), operation)
        return
    before = pair.source.copy(), np.full(SIZE, 255, np.uint8)
    for seed, blocks in enumerate((1, 7, 20, 25)):
        selection = some_selection(grid, blocks, seed)
        images = []
        for by_number in (False, True):
            pair.source[:], pair.target[:] = before
            transfer = (
                lane.submit_selection("p", selection, operation)
                if by_number
                else lane.submit("p", selection.descriptors(), operation)
            )
            assert finish(lane, transfer) is State.DONE
            assert transfer.bytes == 597 * blocks
            images.append((pair.source.copy(), pair.target.copy()))
        for one, other in zip(*images, strict=True):
            assert (one == other).all()
        moved, still = (1, 0) if operation == "read" else (0, 1)
        assert (images[0][moved] != before[moved]).sum() > 500 * blocks
        assert (images[0][still] == before[still]).all()


@takes_selections
def test_no_picks_are_done_at_once(pair: Pair) -> None:
    lane = picking(pair)
    assert finish(lane, lane.submit_selection("p", some_selection(a_grid(pair), 0, 0))) is State.DONE


@takes_selections
def test_wrong_picks_are_refused_and_leave_the_lane_usable(pair: Pair) -> None:
    lane, grid = picking(pair), a_grid(pair)
    one = np.array([0], np.int32)
    wrong = [
        Selection(grid, np.array(cells, np.int32), np.array(others, np.int32), 400)
        for cells, others in (([120], [0]), ([-1], [0]), ([0], [75]), ([0], [-1]), ([0, 1], [0]))
    ]
    for selection in wrong:
        with pytest.raises(TransferRefused):
            lane.submit_selection("p", selection)
    with pytest.raises(TransferRefused, match="'q'"):
        lane.submit_selection("q", Selection(grid, one, one, 400))
    assert not pair.target.any()
    assert finish(lane, lane.submit_selection("p", Selection(grid, one, one, 400))) is State.DONE
    assert (pair.target[:400] == pair.source[2000:2400]).all()


@takes_selections
def test_a_grid_that_reaches_beyond_registered_memory_still_serves_what_is_inside(pair: Pair) -> None:
    lane, grid = picking(pair), a_grid(pair)
    wide = replace(grid, remote_blocks=1 << 20)
    inside, outside = np.array([3], np.int32), np.array([1 << 19], np.int32)
    with pytest.raises(TransferRefused):
        lane.submit_selection("p", Selection(wide, inside, outside, 400))
    assert finish(lane, lane.submit_selection("p", Selection(wide, inside, inside, 400))) is State.DONE
    assert (pair.target[3000:3400] == pair.source[11000:11400]).all()


@takes_selections
def test_picks_outlive_a_peer_that_is_added_anew(pair: Pair) -> None:
    lane, grid = picking(pair), a_grid(pair)
    assert finish(lane, lane.submit_selection("p", some_selection(grid, 9, 1))) is State.DONE
    successor = pair.backend(pair.source)
    lane.add("p", successor.metadata())
    pair.peer.close()
    pair.target[:] = 0
    assert finish(lane, lane.submit_selection("p", some_selection(grid, 9, 1))) is State.DONE
    assert pair.target.any()
    lane.close()
    successor.close()


@takes_selections
def test_a_lane_that_prepared_grids_closes_though_its_errors_are_kept(pair: Pair) -> None:
    """What a backend prepares refers to its agent, which must be gone when `close` returns."""
    lane, grid = picking(pair), a_grid(pair)
    assert finish(lane, lane.submit_selection("p", some_selection(grid, 9, 1))) is State.DONE
    with pytest.raises(TransferRefused) as kept:
        lane.submit_selection("p", Selection(grid, np.array([999], np.int32), np.array([0], np.int32), 400))
    lane.close()
    assert kept.value.__traceback__ is not None
    with pytest.raises(TransferRefused, match="closed"):
        lane.submit_selection("p", some_selection(grid, 9, 1))


def test_writes(pair: Pair) -> None:
    pair.target[:] = 255
    lane = pair.lane()
    if ADAPTERS[pair.kind].reads_only:
        with pytest.raises(TransferRefused, match="only reads"):
            lane.submit("p", pair.rows((0, 10, 20)), "write")
        assert (pair.source != 255).all()
        return
    assert finish(lane, lane.submit("p", pair.rows((0, 10, 20)), "write")) is State.DONE
    assert (pair.source[10:30] == 255).all()
    assert (pair.source[:10] != 255).all()
    assert (pair.source[30:] != 255).all()


def test_nothing_to_copy_is_done_at_once(pair: Pair) -> None:
    lane = pair.lane()
    assert finish(lane, lane.submit("p", pair.rows())) is State.DONE


def test_adding_again_and_adding_anew(pair: Pair) -> None:
    lane = pair.lane()
    lane.add("p", pair.peer.metadata())
    successor = pair.backend(pair.source)
    lane.add("p", successor.metadata())
    pair.peer.close()
    assert finish(lane, lane.submit("p", pair.rows((0, 0, 100)))) is State.DONE
    assert (pair.target[:100] == pair.source[:100]).all()
    lane.close()
    successor.close()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda _: b"", "0 bytes"),
        (lambda _: b"nonsense" * 9, "nons"),
        (lambda good: good[:20], "header should have"),
        (lambda good: good[:4] + b"\x00\x09" + good[6:], "version 9 at the peer and 1 here"),
        (lambda good: good[:22] + b"\xff" + good[23:], "cannot be read: .*utf-8"),
        (lambda _: pack(Envelope("pigeon", "0.3", "a", (), b"")), "'pigeon' at the peer"),
    ],
)
def test_unusable_metadata_is_refused_with_both_values(pair: Pair, spoil: object, says: str) -> None:
    lane = pair.me.lane("x")
    assert callable(spoil)
    with pytest.raises(PeerMetadataError, match=says):
        lane.add("p", spoil(pair.peer.metadata()))


def test_other_version_is_refused_with_both_values(pair: Pair) -> None:
    stranger = pack(Envelope(pair.kind, "0.9.1", "a", (Region(4096, 4096),), b""))
    with raises("KVD-BACKEND-METADATA", match=r"0\.9\.1 at the peer and"):
        pair.me.lane("x").add("p", stranger)


def test_refusals_leave_the_lane_usable(pair: Pair) -> None:
    lane = pair.lane()
    for rows in (pair.rows((0, SIZE - 5, 10)), pair.rows((SIZE - 5, 0, 10))):
        with pytest.raises(TransferRefused):
            lane.submit("p", rows)
    with pytest.raises(TransferRefused, match="'q'"):
        lane.submit("q", pair.rows((0, 0, 10)))
    assert not pair.target.any()
    assert finish(lane, lane.submit("p", pair.rows((0, 0, 10)))) is State.DONE


def test_a_closed_lane_takes_nothing_and_harms_no_other(pair: Pair) -> None:
    first, second = pair.lane(), pair.lane()
    first.close()
    first.close()
    with pytest.raises(TransferRefused, match="closed"):
        first.submit("p", pair.rows((0, 0, 10)))
    assert finish(second, second.submit("p", pair.rows((0, 0, 10)))) is State.DONE
    remade = pair.lane()
    assert finish(remade, remade.submit("p", pair.rows((0, 0, 10)))) is State.DONE


def test_a_backend_wants_memory_first_and_once(pair: Pair) -> None:
    bare = open_backend(pair.kind, "bare", {})
    with raises("KVD-BACKEND-REGISTER"):
        bare.metadata()
    with raises("KVD-BACKEND-REGISTER"):
        bare.lane("x")
    with raises("KVD-BACKEND-REGISTER"):
        bare.register([Region(4096, 0)])
    with raises("KVD-BACKEND-REGISTER"):
        pair.me.register([Region(4096, 4096)])
    bare.close()
    bare.close()
    with raises("KVD-BACKEND", match="closed"):
        bare.lane("x")


def test_unknown_option_is_named(pair: Pair) -> None:
    with pytest.raises(BackendError, match="colour"):
        open_backend(pair.kind, "x", {"colour": 1})
