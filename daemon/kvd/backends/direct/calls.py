"""The system calls of the direct backend, through ctypes: the GIL is released while the kernel copies."""

from __future__ import annotations

import ctypes
import os

import numpy as np
from numpy.typing import NDArray

IOV_MAX = 1024
"""Most rows that the kernel takes in one call."""

_POLLIN = 1
_PR_GET_DUMPABLE = 3
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)

_libc = ctypes.CDLL(None, use_errno=True)
# For calls that are over at once: those that let go of the GIL wait to have it back, far longer in a busy worker.
_keeping = ctypes.PyDLL(None, use_errno=True)
_readv, _peek = _libc.process_vm_readv, _keeping.process_vm_readv
for _one in (_readv, _peek):
    _one.restype = ctypes.c_ssize_t
    _one.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]


class _Poll(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


def read_rows(pid: int, local: NDArray[np.uint64], remote: NDArray[np.uint64]) -> int:
    """Copy rows of ``remote`` in process ``pid`` to those of ``local`` here; gives the bytes copied, maybe not all.

    Each side is a C-contiguous array of (address, bytes), shape (n, 2) with n at most `IOV_MAX`: the kernel's iovec.

    Raises:
        OSError: nothing was copied; ESRCH where the process is gone, EPERM where it is closed to us, EFAULT where the
            first byte is not mapped.
    """
    return _copied(_readv(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0))


def read_bytes(pid: int, address: int, length: int) -> bytes:
    """A few bytes at ``address`` of process ``pid``; fewer where the rest is not mapped. Raises as `read_rows`."""
    buffer = ctypes.create_string_buffer(length)
    here = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), length)
    there = (ctypes.c_size_t * 2)(address, length)
    copied = _copied(_peek(pid, ctypes.addressof(here), 1, ctypes.addressof(there), 1, 0))
    return buffer.raw[:copied]


def readable(fd: int) -> bool:
    """Whether something can be read from a descriptor now: of a pidfd, whether its process has ended."""
    asked = _Poll(fd, _POLLIN, 0)
    return int(_keeping.poll(ctypes.byref(asked), ctypes.c_ulong(1), 0)) > 0


def _copied(answer: int) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(answer)


def allow_tracers() -> bool:
    """Let any process that the other rules admit read this one, where Yama restricts that; False where it can't."""
    return int(_libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)) == 0


def dumpable() -> bool:
    """Whether this process lets others of its user look into it at all."""
    return int(_libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)) == 1
