"""Zeroing runs of a worker's memory: on the host for real, on a device with a made-up driver."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.backends import zeroing
from kvd.backends.cuda import driver as cuda_driver
from kvd.backends.errors import BackendError
from kvd.backends.zeroing import boxes, zero
from kvd.geometry.model import Region
from kvd.topology.leftover import NO_RUNS, Runs

BASE = 1 << 40
GPU = [Region(BASE, 1 << 20, "cuda:1")]


def runs(*parts: tuple[int, int], base: int = 0) -> Runs:
    return Runs(
        np.array([base + at for at, _ in parts], np.int64),
        np.array([length for _, length in parts], np.int64),
    )


def memory(size: int) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], Region]:
    array = np.full(size, 0xFF, np.uint8)
    return array, Region(int(array.ctypes.data), size)


def test_these_bytes_and_no_others_are_zero() -> None:
    array, region = memory(100)
    zero([region], runs((0, 3), (10, 1), (90, 10), base=region.address))
    assert np.flatnonzero(array == 0).tolist() == [0, 1, 2, 10, *range(90, 100)]


def test_long_runs_let_others_run_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    array, region = memory(3 * zeroing.LONG)
    kept: list[int] = []
    monkeypatch.setattr(zeroing, "_holding", lambda *arguments: kept.append(arguments[2]))
    zero([region], runs((0, 8), (zeroing.LONG, zeroing.LONG), base=region.address))
    assert kept == [8]
    assert not array[zeroing.LONG : 2 * zeroing.LONG].any()
    assert array[2 * zeroing.LONG :].all()


@pytest.mark.parametrize("part", [(-1, 2), (99, 2), (5000, 1)])
def test_nothing_outside_of_the_memory_is_touched(part: tuple[int, int]) -> None:
    array, region = memory(100)
    with pytest.raises(BackendError, match=r"outside every region"):
        zero([region], runs((0, 1), part, base=region.address))
    assert array.all()


def test_memory_of_another_kind_is_not_touched() -> None:
    with pytest.raises(BackendError, match="memory of xpu cannot be zeroed here"):
        zero([Region(BASE, 10, "xpu:0")], runs((0, 1), base=BASE))


def test_nothing_to_zero_needs_no_driver() -> None:
    zero(GPU, NO_RUNS)


# --- fewer launches ---


@st.composite
def some_runs(draw: st.DrawFn) -> Runs:
    gaps = draw(st.lists(st.sampled_from((1, 2, 5)), max_size=12))
    lengths = [draw(st.sampled_from((1, 1, 2, 4))) for _ in gaps]
    at, parts = 0, []
    for gap, length in zip(gaps, lengths, strict=True):
        at += gap
        parts.append((at, length))
        at += length
    return runs(*parts)


@given(some_runs())
def test_boxes_are_the_same_bytes(parts: Runs) -> None:
    wanted = [
        b for a, n in zip(parts.address.tolist(), parts.length.tolist(), strict=True) for b in range(a, a + n)
    ]
    made = [
        address + row * pitch + byte
        for address, pitch, width, height in boxes(parts)
        for row in range(height)
        for byte in range(width)
    ]
    assert made == wanted


def test_heads_of_a_layer_are_one_box() -> None:
    """Two layers of four heads each: 32 bytes of every 128, and the layers lie 10,000 apart."""
    parts = runs(*((layer * 10_000 + head * 128, 32) for layer in range(2) for head in range(4)))
    assert list(boxes(parts)) == [(0, 128, 32, 4), (10_000, 128, 32, 4)]


def test_runs_of_other_lengths_or_far_apart_stand_alone() -> None:
    far = zeroing.MAX_PITCH + 1
    assert [box.height for box in boxes(runs((0, 4), (8, 5), (far + 8, 5)))] == [1, 1, 1]


def test_no_box_reaches_from_one_region_into_the_next() -> None:
    """One run in each of three layers that stand at one distance."""
    parts = runs((100, 32), (1100, 32), (2100, 32))
    assert [box.height for box in boxes(parts)] == [3]
    assert [box.height for box in boxes(parts, [0, 1000, 2000])] == [1, 1, 1]
    assert [box.height for box in boxes(parts, [2000, 0])] == [2, 1]


# --- on a device ---


class Driver:
    """Takes note of what is launched; ``fails`` is the call that it refuses."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.fails = ""

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name == "cuStreamCreate":
                arguments[0]._obj.value = 77
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"no such thing"
            if name.startswith(("cuMemset", "cuStreamS")):
                self.calls.append((name, tuple(argument.value for argument in arguments)))
            return 700 if name == self.fails else 0

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(cuda_driver, "library", lambda: made)
    monkeypatch.setattr(cuda_driver, "holding", lambda: made)
    monkeypatch.setattr(cuda_driver, "_contexts", {})
    monkeypatch.setattr(cuda_driver, "_streams", {})
    monkeypatch.setattr(cuda_driver, "_current", threading.local())
    return made


def test_a_device_zeroes_rows_at_once_on_a_stream_of_its_own_and_is_waited_for(driver: Driver) -> None:
    zero(GPU, runs((0, 32), (128, 32), (1000, 64), base=BASE))
    assert driver.calls == [
        ("cuMemsetD2D8Async", (BASE, 128, 0, 32, 2, 77)),
        ("cuMemsetD8Async", (BASE + 1000, 0, 64, 77)),
        ("cuStreamSynchronize", (77,)),
    ]


def test_a_device_gets_no_launch_that_spans_two_allocations(driver: Driver) -> None:
    regions = [Region(BASE + at, 1 << 20, "cuda:1") for at in (0, 2 << 20)]
    zero(regions, runs((64, 32), ((2 << 20) + 64, 32), base=BASE))
    assert [name for name, _ in driver.calls] == ["cuMemsetD8Async"] * 2 + ["cuStreamSynchronize"]


def test_what_the_device_says_is_passed_on_and_what_was_launched_is_waited_for(driver: Driver) -> None:
    driver.fails = "cuMemsetD8Async"
    with pytest.raises(BackendError, match=r"cuMemsetD8Async: no such thing \(700\)"):
        zero(GPU, runs((0, 32), base=BASE))
    assert driver.calls[-1][0] == "cuStreamSynchronize"


def test_calls_that_keep_the_lock_are_of_the_same_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", None)  # this process itself
    cuda_driver.holding.cache_clear()
    assert isinstance(cuda_driver.holding(), ctypes.PyDLL)
    cuda_driver.holding.cache_clear()
