"""Which device is current in which thread, with a made-up driver: here is no GPU."""

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvd.backends.cuda import driver as cuda_driver
from kvd.backends.cuda import ipc as cuda_ipc
from kvd.backends.errors import BackendError, BackendUnavailable
from kvd.geometry.model import Region

HOST = Region(4096, 4096)
GPU = Region(1 << 40, 4096, "cuda:1")


class Driver:
    """Takes note of the calls, by thread, and answers ``fails`` to one of them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.fails = ""

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append((threading.current_thread().name, name))
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"no such thing"
            if name == "cuMemGetAddressRange_v2":
                arguments[0]._obj.value, arguments[1]._obj.value = arguments[2].value & ~0xFFFFF, 1 << 20
            if name == "cuMemcpyDtoH_v2":
                ctypes.memmove(arguments[0], b"sixteen bytes ..", arguments[2].value)
            return 700 if name == self.fails else 0

        return call

    def names(self, thread: str) -> list[str]:
        return [name for who, name in self.calls if who == thread]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(cuda_driver, "library", lambda: made)
    monkeypatch.setattr(cuda_driver, "_contexts", {})
    monkeypatch.setattr(cuda_driver, "_current", threading.local())
    return made


def on_a_thread(name: str, *calls: Callable[[], None]) -> None:
    thread = threading.Thread(target=lambda: [call() for call in calls], name=name)
    thread.start()
    thread.join()


def test_host_memory_needs_no_driver() -> None:
    assert cuda_driver.ordinal([HOST]) is None


def test_a_worker_has_one_device() -> None:
    assert cuda_driver.ordinal([HOST, GPU]) == 1
    with pytest.raises(BackendError, match=r"devices \[0, 1\]"):
        cuda_driver.ordinal([GPU, Region(1, 1, "cuda:0")])


def test_each_thread_gets_the_one_context_once(driver: Driver) -> None:
    enter = partial(cuda_driver.enter, 1)
    on_a_thread("first", enter, enter)
    on_a_thread("second", enter, enter)
    assert driver.names("first") == ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    assert driver.names("second") == ["cuCtxSetCurrent"]


def test_waiting_for_a_device_is_done_in_its_context(driver: Driver) -> None:
    on_a_thread("closing", lambda: cuda_driver.settle(1))
    assert driver.names("closing")[-2:] == ["cuCtxSetCurrent", "cuCtxSynchronize"]


def test_what_the_driver_says_is_passed_on(driver: Driver) -> None:
    driver.fails = "cuCtxSynchronize"
    with pytest.raises(BackendError, match=r"cuCtxSynchronize: no such thing \(700\)"):
        cuda_driver.settle(1)


@pytest.mark.usefixtures("driver")
def test_allocations_and_their_bytes() -> None:
    assert cuda_driver.allocation(Region((1 << 40) + 4096, 8192, "cuda:1")) == Region(
        1 << 40, 1 << 20, "cuda:1"
    )
    assert cuda_driver.read(1, 1 << 40, 16) == b"sixteen bytes .."


def test_the_allocation_of_an_address_is_asked_for_in_a_context_that_is_not_left_current(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_ipc, "library", lambda: driver)
    device = cuda_ipc.Driver(1)
    del driver.calls[:]
    assert device.allocation((1 << 40) + 4096) == Region(1 << 40, 1 << 20, "cuda:1")
    names = [name for _, name in driver.calls]
    assert names == ["cuCtxPushCurrent_v2", "cuMemGetAddressRange_v2", "cuCtxPopCurrent_v2"]


def test_without_a_driver_the_hint_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libno-such-driver.so.1")
    cuda_driver.library.cache_clear()
    with pytest.raises(BackendUnavailable, match="libno-such-driver") as caught:
        cuda_driver.enter(1)
    assert "NVIDIA runtime" in caught.value.hint
    cuda_driver.library.cache_clear()
