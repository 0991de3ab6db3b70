"""The few calls of the CUDA driver that the adapters make themselves: its context in each thread, and waiting for it.

Through ctypes, as every process that has memory on such a device has the driver's library loaded already, and nothing
else that could be asked is always there. Ordinals are this process's own: CUDA_VISIBLE_DEVICES has been applied.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from kvd.backends.errors import BackendError, BackendUnavailable
from kvd.backends.regions import parse_device
from kvd.geometry.model import Region

LIBRARY = "libcuda.so.1"
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: it does not wait for the default stream

_PIN_TO_READ = 1 | 2 | 8  # CU_MEMHOSTREGISTER_PORTABLE, _DEVICEMAP and _READ_ONLY

_current = threading.local()
_contexts: dict[int, ctypes.c_void_p] = {}
_streams: dict[int, ctypes.c_void_p] = {}
_lock = threading.Lock()


class CudaError(BackendError, RuntimeError):
    """The driver refused: ``call`` and its ``number`` and words. A RuntimeError, as those of torch and Triton are."""

    def __init__(self, call: str, number: int, words: str) -> None:
        super().__init__(f"{call}: {words} ({number})")
        self.call = call
        self.number = number


def ordinal(regions: Sequence[Region]) -> int | None:
    """The CUDA device that ``regions`` are on, None for host memory.

    Raises:
        BackendError: they are on several; a worker has one.
    """
    found = {index for kind, index in (parse_device(r.device) for r in regions) if kind == "cuda"}
    if len(found) > 1:
        raise BackendError(f"memory is on CUDA devices {sorted(found)}; a worker has one")
    return found.pop() if found else None


def enter(device: int | None) -> None:
    """Make the primary context of ``device``, if any, current in this thread, as the CUDA runtime and torch do.

    Raises:
        BackendUnavailable: no driver, or no such device.
    """
    if device is not None and getattr(_current, "device", None) != device:
        _call("cuCtxSetCurrent", context(device))
        _current.device = device


def context(device: int) -> ctypes.c_void_p:
    """The primary context of ``device``, which torch uses too; until the process ends, as the KV memory is there.

    Raises:
        BackendUnavailable: no driver.
        CudaError: no such device.
    """
    with _lock:
        if device not in _contexts:
            made, handle = ctypes.c_void_p(), ctypes.c_int()
            _call("cuDeviceGet", ctypes.byref(handle), device)
            _call("cuDevicePrimaryCtxRetain", ctypes.byref(made), handle)
            _contexts[device] = made
        return _contexts[device]


@contextmanager
def current(cuda: Any, of: ctypes.c_void_p) -> Iterator[None]:
    """Have a context current while calls of ``cuda`` are made, and then the one from before."""
    call(cuda, "cuCtxPushCurrent_v2", of)
    try:
        yield
    finally:
        call(cuda, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def pci_device(device: int) -> tuple[str, str]:
    """What ``device`` is called, and its PCI address as Linux writes it (``0000:18:00.0``); no context is made for it.

    Raises:
        BackendUnavailable: no driver.
        CudaError: no such device.
    """
    handle, address, name = ctypes.c_int(), ctypes.create_string_buffer(32), ctypes.create_string_buffer(128)
    _call("cuDeviceGet", ctypes.byref(handle), device)
    _call("cuDeviceGetPCIBusId", address, len(address), handle)
    _call("cuDeviceGetName", name, len(name), handle)
    return name.value.decode(errors="replace"), address.value.decode().lower()


def settle(device: int | None) -> None:
    """Wait until ``device``, if any, has done all that this process has asked of it. The GIL is released meanwhile.

    Raises:
        BackendError: it reports an error.
    """
    if device is not None:
        enter(device)
        _call("cuCtxSynchronize")


def allocation(region: Region) -> Region:
    """The allocation that a region on a device lies in: memory is shared between processes by allocations.

    Raises:
        BackendError: the driver knows no allocation there.
    """
    _, device = parse_device(region.device)
    enter(device)
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(region.address))
    return Region(base.value, size.value, region.device)


def allocate(device: int, size: int) -> int:
    """The address of ``size`` new bytes on ``device``.

    Raises:
        BackendError: there is no room.
    """
    enter(device)
    address = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    return int(address.value)


def free(device: int, address: int) -> None:
    """Give back what `allocate` gave.

    Raises:
        BackendError: it is not.
    """
    enter(device)
    _call("cuMemFree_v2", ctypes.c_uint64(address))


def write(device: int, address: int, data: bytes) -> None:
    """Copy from the host; returns when it is there."""
    enter(device)
    _call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))


def read(device: int, address: int, size: int) -> bytes:
    """Copy to the host; returns when it is here."""
    enter(device)
    data = ctypes.create_string_buffer(size)
    _call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(size))
    return data.raw


def copy(device: int, to: int, source: int, size: int) -> None:
    """Copy within the device; returns when it is done.

    Raises:
        BackendError: an address that is not its, or the device reports an error.
    """
    enter(device)
    _call("cuMemcpyDtoD_v2", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size))
    _call("cuCtxSynchronize")


def zero(device: int, boxes: Iterable[tuple[int, int, int, int]]) -> None:
    """Zero boxes of memory, each (address, pitch, width, height); returns when all are zero.

    On a stream of its own, which waits for nothing that was queued before.

    Raises:
        BackendError: the device reports an error.
    """
    enter(device)
    stream = _stream(device)
    try:
        for address, pitch, width, height in boxes:
            at, size = ctypes.c_uint64(address), ctypes.c_size_t(width)
            if height == 1:
                _launch("cuMemsetD8Async", at, ctypes.c_ubyte(0), size, stream)
            else:
                apart, rows = ctypes.c_size_t(pitch), ctypes.c_size_t(height)
                _launch("cuMemsetD2D8Async", at, apart, ctypes.c_ubyte(0), size, rows, stream)
    finally:
        _call("cuStreamSynchronize", stream)


def pin(device: int, address: int, size: int) -> None:
    """Let ``device`` read host memory of this process, which may be mapped to be read only. Takes long for much of it.

    Raises:
        CudaError: it does not.
    """
    enter(device)
    _call(
        "cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(_PIN_TO_READ)
    )


def unpin(device: int, address: int) -> None:
    """Undo `pin`.

    Raises:
        CudaError: it is not.
    """
    enter(device)
    _call("cuMemHostUnregister", ctypes.c_void_p(address))


def _stream(device: int) -> ctypes.c_void_p:
    """A stream for small work on ``device``, whose context is current; until the process ends."""
    with _lock:
        if device not in _streams:
            made = ctypes.c_void_p()
            _call("cuStreamCreate", ctypes.byref(made), ctypes.c_uint(_NON_BLOCKING))
            _streams[device] = made
        return _streams[device]


def _launch(name: str, *arguments: Any) -> None:
    """As `_call`, for what returns at once: Python's lock is kept, as getting it back would take longer."""
    call(holding(), name, *arguments)


def _call(name: str, *arguments: Any) -> None:
    call(library(), name, *arguments)


def call(cuda: Any, name: str, *arguments: Any) -> None:
    """Call the driver by way of ``cuda``, one of `library` and `holding`.

    Raises:
        CudaError: what it answered, with its words.
    """
    if number := int(getattr(cuda, name)(*arguments)):
        raise failed(cuda, name, number)


def failed(cuda: Any, name: str, number: int) -> CudaError:
    """The error for what a call answered, with the driver's words."""
    text = ctypes.c_char_p()
    cuda.cuGetErrorString(number, ctypes.byref(text))
    return CudaError(name, number, (text.value or b"an unknown error").decode())


@lru_cache(maxsize=1)
def library() -> Any:
    """The driver, with calls that let go of Python's lock.

    Raises:
        BackendUnavailable: there is none on this system.
    """
    try:
        loaded = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise BackendUnavailable(
            f"memory on a CUDA device and no driver: {error}",
            hint="in a container, run it with the NVIDIA runtime",
        ) from error
    if code := loaded.cuInit(0):
        raise BackendUnavailable(f"CUDA: cuInit: error {code}")
    return loaded


@lru_cache(maxsize=1)
def holding() -> Any:
    """The same library, with calls that keep Python's lock."""
    return ctypes.PyDLL(LIBRARY)
