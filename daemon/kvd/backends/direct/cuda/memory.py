"""Device memory that other processes can map: what its owner hands out, and what a reader has mapped of others.

Plain IPC shares a whole allocation by a handle of 64 bytes. Memory made with the driver's virtual memory calls (torch's
expandable segments, vLLM's sleep mode) has no such handle. Where its maker allowed it, its parts are exported as file
descriptors. A reader takes these out of the owner's process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence

from kvd.backends.cuda.driver import CudaError
from kvd.backends.cuda.ipc import Driver, driver
from kvd.backends.direct.card import SharedStretch
from kvd.backends.direct.process import NAME
from kvd.backends.errors import RegistrationError
from kvd.backends.regions import joined
from kvd.geometry.model import Region

MOST_PARTS = 512
"""File descriptors that an owner keeps open: more would crowd out its sockets."""

_SYS_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def ipc_namespace() -> int:
    """The inode of this process's IPC namespace."""
    return os.stat("/proc/self/ns/ipc").st_ino  # noqa: PTH116 - Path.stat would do the same


def share(device: Driver, regions: Sequence[Region]) -> tuple[SharedStretch, ...]:
    """Export the allocations that the regions lie in; the descriptors in ``parts`` are the caller's to close.

    Raises:
        RegistrationError: one cannot be shared, and why.
    """
    made: list[SharedStretch] = []
    try:
        for region in joined(regions):
            reached, end = region.address, region.address + region.length
            while reached < end:
                one = _shared(device, region, reached, end)
                if not made or made[-1].address != one.address:
                    made.append(one)
                reached = one.address + one.length
    except BaseException:
        unshare(made)
        raise
    return tuple(made)


def unshare(made: Sequence[SharedStretch]) -> None:
    """Close what `share` opened. What readers have mapped stays theirs."""
    for one in made:
        for fd, _ in one.parts:
            os.close(fd)


def stretches(
    regions: Sequence[Region], memory: Sequence[SharedStretch], mapped: Sequence[int]
) -> tuple[list[Region], list[int]]:
    """The regions cut where allocations end, and where each piece stands for a reader who has ``memory`` ``mapped``.

    What lies in none of ``memory`` is left out.
    """
    pieces: list[Region] = []
    places: list[int] = []
    for region in joined(regions):
        for one, at in sorted(zip(memory, mapped, strict=True), key=lambda pair: pair[0].address):
            first = max(region.address, one.address)
            end = min(region.address + region.length, one.address + one.length)
            if first < end:
                pieces.append(Region(first, end - first, region.device))
                places.append(at + first - one.address)
    return pieces, places


class Mappings:
    """What this process has mapped of others on one device: once each, for as long as anybody holds it.

    The driver maps a handle once in a process, and lanes to one peer come and go.
    """

    def __init__(self, device: Driver) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._held: dict[tuple[str, SharedStretch], tuple[int, Region | None, int]] = {}

    def __len__(self) -> int:
        """How many stretches are mapped."""
        return len(self._held)

    def take(self, owner: str, shared: SharedStretch, fetch: Callable[[int], int]) -> int:
        """Map a stretch of the backend ``owner``; ``fetch`` gives a descriptor of the owner as one of this process.

        Raises:
            CudaError: the driver refuses.
            OSError: a descriptor cannot be fetched.
        """
        with self._lock:
            at, span, holders = self._held.get((owner, shared), (0, None, 0))
            if not holders:
                at, span = self._map(shared, fetch)
            self._held[owner, shared] = (at, span, holders + 1)
            return at

    def give_back(self, owner: str, shared: SharedStretch) -> None:
        """Let go of what `take` gave; the last one unmaps, so no kernel may read there any more.

        Raises:
            CudaError: the driver refuses, which leaves it mapped.
        """
        with self._lock:
            at, span, holders = self._held.pop((owner, shared))
            if holders > 1:
                self._held[owner, shared] = (at, span, holders - 1)
            elif span is not None:
                self._device.unmap(span)
            else:
                self._device.close_handle(at)

    def _map(self, shared: SharedStretch, fetch: Callable[[int], int]) -> tuple[int, Region | None]:
        if shared.handle:
            return self._device.open_handle(shared.handle), None
        fetched: list[tuple[int, int]] = []
        try:
            fetched.extend((fetch(fd), length) for fd, length in shared.parts)
            span = self._device.map_descriptors(fetched)
        finally:
            for fd, _ in fetched:
                os.close(fd)
        return span.address, span


@functools.cache
def mappings(ordinal: int) -> Mappings:
    """What this process has mapped on device ``ordinal``."""
    return Mappings(driver(ordinal))


def fetch_descriptor(pidfd: int, fd: int) -> int:
    """Descriptor ``fd`` of the process of a pidfd, as one of this process.

    Raises:
        OSError: it has none such, or may not be asked: this takes what a debugger needs.
    """
    found = int(_libc.syscall(_SYS_PIDFD_GETFD, pidfd, fd, 0))
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


def _shared(device: Driver, region: Region, reached: int, end: int) -> SharedStretch:
    """The stretch that begins at or before ``reached``: an allocation, or the parts of one up to ``end``."""
    try:
        allocation = device.allocation(reached)
        if device.shares_by_handle(reached):
            return SharedStretch(allocation.address, allocation.length, device.handle(allocation.address))
        if not device.shares_by_descriptor(reached):
            raise RegistrationError(
                f"{region} cannot be shared: its memory was made without a handle that other processes can open"
                " (expandable segments or sleep mode)",
                backend=NAME,
                hint="allocate KV memory with cudaMalloc: leave out expandable_segments:True of"
                " PYTORCH_CUDA_ALLOC_CONF and vLLM's enable_sleep_mode, or set backend auto",
            )
        return _parts(device, region, allocation, end)
    except (CudaError, OSError) as error:
        raise RegistrationError(f"{region} cannot be shared: {error}", backend=NAME) from None


def _parts(device: Driver, region: Region, first: Region, end: int) -> SharedStretch:
    parts: list[tuple[int, int]] = []
    reached, part = first.address, first
    try:
        while True:
            parts.append((device.export(part.address), part.length))
            reached += part.length
            if reached >= end:
                break
            if len(parts) == MOST_PARTS:
                raise RegistrationError(  # noqa: TRY301 - what was opened is closed below
                    f"{region} cannot be shared: it is made of more than {MOST_PARTS} parts",
                    backend=NAME,
                    hint="allocate KV memory with cudaMalloc, or set backend auto",
                )
            part = device.allocation(reached)
    except BaseException:
        for fd, _ in parts:
            os.close(fd)
        raise
    return SharedStretch(first.address, reached - first.address, parts=tuple(parts))
