"""Large reads by several threads: the same bytes, in pieces; and what becomes of the whole when a piece is lost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kvd.backends import split_lane
from kvd.backends.contract import SelectingLane, State, orders_streams
from kvd.backends.direct.host import copy as direct_copy
from kvd.backends.direct.host import lane as direct_lane
from kvd.backends.direct.host.lane import DirectLane
from kvd.backends.errors import BackendError, TransferRefused, WorkerUnreachable
from kvd.backends.nixl import backend as nixl
from kvd.backends.nixl.lane import NixlLane
from kvd.backends.registry import open_backend
from kvd.backends.split_lane import LEAST_BYTES, PIECE_BYTES, SplitLane
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import Grid, Selection
from tests.support.rigs.split import PATIENCE, SIZE, SplitBench, Watched, assert_set, finish, together


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture(params=["nixl", "direct"])
def bench(request: pytest.FixtureRequest, stack: ExitStack) -> SplitBench:
    request.getfixturevalue("processors")
    if request.param == "nixl":
        pytest.importorskip("nixl", exc_type=ImportError)
    return SplitBench(request.param, stack)


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as any test wants threads, where there may be two."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


@pytest.fixture
def direct(request: pytest.FixtureRequest, stack: ExitStack) -> SplitBench:
    request.getfixturevalue("processors")
    return SplitBench("direct", stack)


@pytest.mark.parametrize("threads", [2, 3])
def test_rows_come_whole_with_every_thread_copying(bench: SplitBench, threads: int) -> None:
    lane = bench.split(threads)
    together(*bench.opened)
    dice = np.random.default_rng(3)
    starts = np.arange(0, SIZE - 40000, 40000)
    lengths = dice.integers(1, 39999, len(starts))
    sources = dice.permutation(starts) + dice.integers(0, 100, len(starts))
    transfer = lane.submit("p", bench.rows(starts, sources, lengths))
    assert finish(lane, transfer) is State.DONE
    image = np.zeros(SIZE, np.uint8)
    for start, source, length in zip(starts, sources, lengths, strict=True):
        image[start : start + length] = bench.source[source : source + length]
    assert (bench.target == image).all()
    assert (transfer.bytes, transfer.descriptors) == (int(lengths.sum()), len(starts))
    assert transfer.ended >= transfer.posted > 0
    posts = [post for watched in bench.opened for post in watched.posts]
    assert sum(nbytes for _, nbytes in posts) == transfer.bytes
    assert max(nbytes for _, nbytes in posts) <= PIECE_BYTES
    assert len({thread for thread, _ in posts}) == threads


def test_picks_come_whole_with_every_thread_copying(bench: SplitBench) -> None:
    lane = bench.split()
    together(*bench.opened)
    blocks, block = 3000, SIZE // 3072
    column = np.array([0, block // 2], np.int64)
    stride = np.full(2, block, np.int64)
    grid = Grid(
        column + bench.target.ctypes.data,
        column + bench.source.ctypes.data,
        np.array([block // 2, block // 3]),
        stride,
        stride,
        blocks,
        blocks,
    )
    cells = np.arange(2 * blocks, dtype=np.int32)[::-1].copy()
    selection = Selection(grid, cells, cells, blocks * (block // 2 + block // 3))
    assert finish(lane, lane.submit_selection("p", selection)) is State.DONE
    image = np.zeros(SIZE, np.uint8)
    pages = image[: blocks * block].reshape(blocks, block)
    for begin, length in ((0, block // 2), (block // 2, block // 3)):
        pages[:, begin : begin + length] = bench.source[: blocks * block].reshape(blocks, block)[
            :, begin : begin + length
        ]
    assert (bench.target == image).all()
    assert all(watched.posts for watched in bench.opened)


def test_one_row_is_cut(bench: SplitBench) -> None:
    lane = bench.split()
    together(*bench.opened)
    assert finish(lane, lane.submit("p", bench.whole())) is State.DONE
    assert (bench.target == bench.source).all()
    assert all(watched.posts for watched in bench.opened)


@pytest.mark.usefixtures("processors")
def test_a_small_read_and_a_write_go_by_one_lane(stack: ExitStack) -> None:
    pytest.importorskip("nixl", exc_type=ImportError)
    bench = SplitBench("nixl", stack)
    lane = bench.split()
    small = bench.whole(LEAST_BYTES - 1)
    assert finish(lane, lane.submit("p", small)) is State.DONE
    bench.target[:] = 7
    assert finish(lane, lane.submit("p", bench.whole(), "write")) is State.DONE
    assert (bench.source == 7).all()
    first, second = bench.opened
    assert [nbytes for _, nbytes in first.posts] == [LEAST_BYTES - 1, SIZE]
    assert not second.posts


@pytest.mark.usefixtures("processors")
def test_other_lanes_are_opened_only_where_the_post_copies(stack: ExitStack) -> None:
    """The memory backend copies when it is polled, as a network would by itself."""
    bench = SplitBench("memory", stack)
    lane = bench.lane()
    for _ in range(2):
        assert finish(lane, lane.submit("p", bench.whole())) is State.DONE
        lane.add("p", bench.peer.metadata())
    assert (bench.target == bench.source).all()
    assert len(bench.opened) == 1


def test_other_lanes_are_opened_only_where_there_is_a_processor_for_them(stack: ExitStack) -> None:
    bench = SplitBench("direct", stack)
    lane = bench.lane()

    def on_one_processor() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of this thread alone
        assert finish(lane, lane.submit("p", bench.whole())) is State.DONE
        lane.add("p", bench.peer.metadata())

    thread = threading.Thread(target=on_one_processor)
    thread.start()
    thread.join()
    assert (bench.target == bench.source).all()
    assert len(bench.opened) == 1


def test_a_read_that_takes_longer_than_its_post_may_shows_it_by_its_processor_time(
    direct: SplitBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_lane, "SLICE_S", 0.0)
    monkeypatch.setattr(direct_copy, "CALL_BYTES", 64 << 10)
    lane = direct.lane()
    for seconds, lanes in ((0.0, 1), (1.0, 2)):
        clock = iter((5.0, 5.0 + seconds))
        with monkeypatch.context() as patch:
            patch.setattr(time, "thread_time", lambda: next(clock))  # noqa: B023
            transfer = lane.submit("p", direct.whole())
        assert transfer.state is State.PENDING
        lane.add("p", direct.peer.metadata())
        assert len(direct.opened) == lanes


def test_a_lane_that_cannot_open_others_reads_alone(
    direct: SplitBench, caplog: pytest.LogCaptureFixture
) -> None:
    def opening(name: str) -> SelectingLane:
        if direct.opened:
            raise BackendError("no more agents", backend="direct")
        return direct.open(name)

    lane = direct.lane(opening=opening)
    for _ in range(3):
        direct.target[:] = 0
        assert finish(lane, lane.submit("p", direct.whole())) is State.DONE
        assert (direct.target == direct.source).all()
        lane.add("p", direct.peer.metadata())
    assert [r.getMessage() for r in caplog.records] == ["reads by peer are not split: no more agents"]


def test_others_are_closed_when_one_of_them_reaches_nobody(direct: SplitBench) -> None:
    def opening(name: str) -> SelectingLane:
        made = direct.open(name)
        if len(direct.opened) == 3:
            made.lane.close()
        return made

    lane = direct.lane(3, opening)
    assert finish(lane, lane.submit("p", direct.whole())) is State.DONE
    lane.add("p", direct.peer.metadata())
    assert [watched.closed for watched in direct.opened] == [False, True, True]
    assert finish(lane, lane.submit("p", direct.whole())) is State.DONE


def test_a_worker_that_only_the_first_lane_reaches_is_read_by_it(
    direct: SplitBench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = direct.split()
    first, second = direct.opened

    def unreachable(*_: object) -> None:
        raise WorkerUnreachable("no way there", backend="direct")

    monkeypatch.setattr(
        Watched, "add", lambda self, *a: unreachable() if self is second else self.lane.add(*a)
    )
    lane.add("another", direct.peer.metadata())
    assert finish(lane, lane.submit("another", direct.whole())) is State.DONE
    assert (direct.target == direct.source).all()
    assert len(first.posts) == 1
    assert second.closed
    assert "no longer split: no way there" in caplog.text


def test_others_are_closed_when_the_first_lane_no_longer_reaches_a_worker(direct: SplitBench) -> None:
    """They would go on reading what it was before."""
    lane = direct.split()
    with pytest.raises(BackendError):
        lane.add("p", b"no metadata")
    assert [watched.closed for watched in direct.opened] == [False, True]
    assert finish(lane, lane.submit("p", direct.whole())) is State.DONE


def test_a_read_of_which_no_piece_was_taken_in_time_begins_with_the_next_poll(
    direct: SplitBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = direct.split()
    with monkeypatch.context() as patch:
        patch.setattr(split_lane, "SLICE_S", -1.0)
        transfer = lane.submit("p", direct.whole())
        assert lane.poll(transfer) is State.PENDING
    assert not any(watched.posts for watched in direct.opened)
    assert finish(lane, transfer) is State.DONE
    assert (direct.target == direct.source).all()
    assert transfer.backend == "direct"


def test_a_thread_that_is_held_up_leaves_the_pieces_to_others(
    direct: SplitBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = 6
    monkeypatch.setattr(split_lane, "PIECE_BYTES", SIZE // pieces)
    lane = direct.split()
    first, second = direct.opened
    others_done = threading.Event()
    begun = threading.Event()

    def hold(_: int) -> None:
        begun.set()
        assert_set(others_done)

    def count(_: int) -> None:
        assert_set(begun)
        if len(first.posts) == pieces - 1:
            others_done.set()

    first.before, second.before = count, hold
    assert finish(lane, lane.submit("p", direct.whole())) is State.DONE
    assert (len(first.posts), len(second.posts)) == (pieces - 1, 1)
    assert (direct.target == direct.source).all()


def test_what_no_lane_takes_is_raised(bench: SplitBench) -> None:
    lane = bench.split()
    with pytest.raises(TransferRefused, match="stranger"):
        lane.submit("stranger", bench.whole())
    with pytest.raises(TransferRefused, match="differ in length"):
        lane.submit("p", Descriptors(bench.whole().local, bench.whole().remote[:0], bench.whole().length))
    negative = bench.rows([0, 5], [0, 5], [SIZE, -1])
    with pytest.raises(TransferRefused, match="-1"):
        lane.submit("p", negative)
    assert not bench.target.any()


def test_one_refused_piece_fails_the_whole_with_its_reason(bench: SplitBench) -> None:
    lane = bench.split()
    together(*bench.opened)  # both have a piece when the last one, which is outside, is refused
    transfer = lane.submit("p", bench.rows([0, 0], [0, SIZE - 1], [LEAST_BYTES, LEAST_BYTES]))
    assert finish(lane, transfer) is State.FAILED
    assert "registered" in transfer.reason
    assert lane.poll(transfer) is State.FAILED


def test_a_read_goes_on_with_each_poll(direct: SplitBench, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = direct.split()
    monkeypatch.setattr(direct_lane, "SLICE_S", 0.0)
    monkeypatch.setattr(direct_copy, "CALL_BYTES", 4 << 20)
    transfer = lane.submit("p", direct.whole())
    assert transfer.state is State.PENDING
    assert not (direct.target == direct.source).all()
    assert finish(lane, transfer) is State.DONE
    assert (direct.target == direct.source).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_all_of_a_read_is_there_for_the_stream_behind_it(
    direct: SplitBench, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    lane = direct.split() if threads > 1 else direct.lane()
    monkeypatch.setattr(direct_lane, "SLICE_S", 0.0)
    monkeypatch.setattr(direct_copy, "CALL_BYTES", 4 << 20)
    transfer = lane.submit("p", direct.whole())
    assert transfer.state.value == "pending"
    lane.precede(transfer, 0)
    assert transfer.state is State.DONE
    assert (direct.target == direct.source).all()


def test_it_orders_streams_where_its_lanes_do(direct: SplitBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DirectLane, "precede")
    assert not orders_streams(direct.lane())


def test_nothing_lands_after_close(direct: SplitBench, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = direct.split()
    monkeypatch.setattr(direct_lane, "SLICE_S", 0.0)
    monkeypatch.setattr(direct_copy, "CALL_BYTES", 64 << 10)
    transfer = lane.submit("p", direct.whole())
    assert transfer.ended == 0
    lane.close()
    assert "closed" in transfer.reason
    direct.target[:] = 0
    assert lane.poll(transfer) is State.FAILED
    assert not direct.target.any()
    assert all(watched.closed for watched in direct.opened)
    lane.close()
    with pytest.raises(TransferRefused, match="closed"):
        lane.submit("p", direct.whole())


def test_close_waits_for_every_thread_that_copies(direct: SplitBench) -> None:
    lane = direct.split()
    first, second = direct.opened
    begun, let_go, order = threading.Event(), threading.Event(), []

    def hold(_: int) -> None:
        begun.set()
        assert_set(let_go)
        order.append("copied")

    first.before = lambda _: assert_set(begun)  # or it might have taken all before the other thread ran
    second.before = hold
    reading = threading.Thread(target=lane.submit, args=("p", direct.whole()))
    reading.start()
    assert_set(begun)

    def close() -> None:
        lane.close()
        order.append("closed")

    closing = threading.Thread(target=close)
    closing.start()
    let_go.set()
    for thread in (reading, closing):
        thread.join(PATIENCE)
    assert order[0] == "copied"
    assert order[-1] == "closed"


def test_a_closed_lane_leaves_no_thread(direct: SplitBench) -> None:
    lane = direct.split()
    assert any(thread.name.startswith("kvd-copy-peer") for thread in threading.enumerate())
    lane.close()
    assert not any(thread.name.startswith("kvd-copy-peer") for thread in threading.enumerate())


@pytest.mark.parametrize(("kind", "plain"), [("nixl", NixlLane), ("direct", DirectLane)])
def test_homes_split_where_bytes_move_by_software_and_more_than_one_thread_may_copy(
    kind: str, plain: type, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    pytest.importorskip("nixl", exc_type=ImportError)
    memory = np.zeros(4096, np.uint8)

    def lane_of(**options: object) -> object:
        backend = open_backend(kind, "worker", options)
        stack.callback(backend.close)
        backend.register([Region(memory.ctypes.data, memory.nbytes)])
        return backend.lane("peer")

    assert isinstance(lane_of(), SplitLane)
    assert isinstance(lane_of(copy_threads=1), plain)
    monkeypatch.setattr(nixl, "software_only", lambda *_: False)
    assert isinstance(lane_of(), NixlLane if kind == "nixl" else SplitLane)


@pytest.mark.parametrize("kind", ["nixl", "direct"])
@pytest.mark.parametrize("threads", [0, 17, True, "2", 1.5])
def test_a_number_of_threads_that_cannot_be_is_refused(kind: str, threads: object) -> None:
    pytest.importorskip("nixl", exc_type=ImportError)
    with pytest.raises(BackendError, match=r"option copy_threads is .*; it is 1 to 16"):
        open_backend(kind, "worker", {"copy_threads": threads})
