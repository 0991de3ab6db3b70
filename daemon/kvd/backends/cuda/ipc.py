"""The calls of the CUDA driver that memory of another process takes, through ctypes.

The driver is there wherever CUDA memory is, whatever bindings are installed; torch, whose streams and events are used
elsewhere, has no functions for these. Errors keep the driver's own words.
"""

from __future__ import annotations

import ctypes
import functools
from contextlib import AbstractContextManager
from typing import Any

from kvd.backends.cuda.driver import call, context, current, library
from kvd.geometry.model import Region

HANDLE_BYTES = 64
"""Of a legacy IPC handle."""
POSIX_FD = 1
"""CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR."""

_LEGACY_IPC = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_HANDLE_TYPES = 14  # CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

_u64, _int, _size, _ptr = ctypes.c_uint64, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


class _Location(ctypes.Structure):
    _fields_ = (("type", _int), ("id", _int))


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", _int))


class Driver:
    """One device of this process, and what can be asked of it. Every call makes the device's context current."""

    def __init__(self, ordinal: int) -> None:
        """The device as CUDA_VISIBLE_DEVICES numbers it.

        Raises:
            BackendUnavailable: no driver on this system.
            CudaError: no such device.
        """
        self._cuda = library()
        self._context = context(ordinal)
        self.ordinal = ordinal
        self._device = self._of_ordinal(ordinal)

    @property
    def uuid(self) -> str:
        """What names the device in every process of the host."""
        return self._uuid(self._device)

    def others(self) -> dict[str, int]:
        """The ordinals of all devices that this process sees, by uuid."""
        count = _int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return {self._uuid(self._of_ordinal(number)): number for number in range(count.value)}

    def reaches(self, ordinal: int) -> bool:
        """Whether this device can read the memory of another one."""
        able = _int()
        self._call("cuDeviceCanAccessPeer", ctypes.byref(able), self._device, self._of_ordinal(ordinal))
        return bool(able.value)

    def allocation(self, address: int) -> Region:
        """The allocation that an address lies in."""
        base, length = _u64(), _size()
        with self._current():
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(length), _u64(address))
        return Region(base.value, length.value, f"cuda:{self.ordinal}")

    def shares_by_handle(self, address: int) -> bool:
        """Whether plain IPC can share the allocation at ``address``."""
        return bool(self._attribute(_LEGACY_IPC, address, _int()))

    def shares_by_descriptor(self, address: int) -> bool:
        """Whether the memory at ``address`` can be exported as a file descriptor."""
        return bool(self._attribute(_HANDLE_TYPES, address, _u64()) & POSIX_FD)

    def handle(self, base: int) -> bytes:
        """The IPC handle of an allocation."""
        found = _Handle()
        with self._current():
            self._call("cuIpcGetMemHandle", ctypes.byref(found), _u64(base))
        return bytes(found)

    def open_handle(self, handle: bytes) -> int:
        """Map another process's allocation; gives where it stands here."""
        at = _u64()
        with self._current():
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(at),
                _Handle.from_buffer_copy(handle),
                ctypes.c_uint(_LAZY_PEER_ACCESS),
            )
        return at.value

    def close_handle(self, address: int) -> None:
        """Unmap what `open_handle` mapped. No kernel may read there any more."""
        with self._current():
            self._call("cuIpcCloseMemHandle", _u64(address))

    def export(self, address: int) -> int:
        """The physical memory mapped at ``address`` as a file descriptor, which is the caller's to close."""
        memory, fd = _u64(), _int(-1)
        with self._current():
            self._call("cuMemRetainAllocationHandle", ctypes.byref(memory), _ptr(address))
            try:
                self._call("cuMemExportToShareableHandle", ctypes.byref(fd), memory, _int(POSIX_FD), _u64(0))
            finally:
                self._call("cuMemRelease", memory)
        return fd.value

    def map_descriptors(self, parts: list[tuple[int, int]]) -> Region:
        """Map exported memory, (file descriptor, bytes) each, one after the other; the descriptors stay open."""
        total, at = sum(length for _, length in parts), _u64()
        with self._current():
            self._call("cuMemAddressReserve", ctypes.byref(at), _size(total), _size(0), _u64(0), _u64(0))
            done = 0
            try:
                for fd, length in parts:
                    memory = _u64()
                    self._call(
                        "cuMemImportFromShareableHandle", ctypes.byref(memory), _ptr(fd), _int(POSIX_FD)
                    )
                    try:
                        self._call(
                            "cuMemMap", _u64(at.value + done), _size(length), _size(0), memory, _u64(0)
                        )
                    finally:
                        self._call("cuMemRelease", memory)
                    done += length
                access = _Access(_Location(1, self._device), 3)  # this device, to read and to write
                self._call("cuMemSetAccess", at, _size(total), ctypes.byref(access), _size(1))
            except BaseException:
                self._unmap(Region(at.value, total, f"cuda:{self.ordinal}"), done)
                raise
        return Region(at.value, total, f"cuda:{self.ordinal}")

    def unmap(self, span: Region) -> None:
        """Undo `map_descriptors`. No kernel may read there any more."""
        with self._current():
            self._unmap(span, span.length)

    def _unmap(self, span: Region, mapped: int) -> None:
        if mapped:
            self._call("cuMemUnmap", _u64(span.address), _size(mapped))
        self._call("cuMemAddressFree", _u64(span.address), _size(span.length))

    def _attribute(self, which: int, address: int, into: Any) -> int:
        with self._current():
            self._call("cuPointerGetAttribute", ctypes.byref(into), _int(which), _u64(address))
        return int(into.value)

    def _of_ordinal(self, ordinal: int) -> int:
        device = _int()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device.value

    def _uuid(self, device: int) -> str:
        found = _Uuid()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(found), device)
        return bytes(found.bytes).hex()

    def _current(self) -> AbstractContextManager[None]:
        return current(self._cuda, self._context)

    def _call(self, name: str, *arguments: Any) -> None:
        call(self._cuda, name, *arguments)


@functools.cache
def driver(ordinal: int) -> Driver:
    """The device ``ordinal`` of this process. Raises as `Driver`."""
    return Driver(ordinal)
