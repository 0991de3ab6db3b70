"""Memory that others can map: the memfd behind a region, for its owner and for a reader; and a backend's cookie."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
from pathlib import Path

import msgspec
import numpy as np

from kvd.geometry.model import Region

_COOKIE_BYTES = 32
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_READ_ONLY_FOR_OTHERS = (
    0x10  # F_SEAL_FUTURE_WRITE, which Python's fcntl does not name: mappings of before may write
)


class Backing(msgspec.Struct, frozen=True):
    """A region's memfd: descriptor ``fd`` of its owner, the region's first byte at ``offset``, inode for comparison."""

    fd: int
    offset: int
    inode: int


def memfd(name: str, length: int) -> mmap.mmap:
    """Fresh memory that other processes can map to read, and nobody can shrink under them; zeros, in pages as touched.

    The mapping keeps a descriptor of the memfd open, which is how they reach it.

    Raises:
        OSError: no memory, or no descriptor left.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, length)
        mapping = mmap.mmap(fd, length)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED_SIZE | _READ_ONLY_FOR_OTHERS)
        return mapping
    finally:
        os.close(fd)


def backing(region: Region) -> Backing | None:
    """The memfd behind a region of this process, or None; its descriptor is the caller's to close."""
    found = _mapping(region)
    if found is None:
        return None
    inode, offset = found
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if entry.stat().st_ino == inode and str(entry.readlink()).startswith("/memfd:"):
                return Backing(os.dup(int(entry.name)), offset, inode)
        except OSError:  # closed since it was listed
            continue
    return None


class MemfdView:
    """A reader's view of a peer's memfd; ``address`` is where the peer's ``offset`` stands here."""

    def __init__(self, pid: int, memory: Backing, length: int) -> None:
        """Map it.

        Raises:
            OSError: it cannot be opened or mapped; ESTALE where the descriptor is of another file by now, EPERM where
                its owner might shrink it, which would be a SIGBUS for us, EINVAL where it is smaller.
        """
        fd = os.open(f"/proc/{pid}/fd/{memory.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if found.st_ino != memory.inode:
                raise OSError(errno.ESTALE, f"descriptor {memory.fd} is of inode {found.st_ino} now")
            if not 0 <= memory.offset <= found.st_size - length:
                wanted = f"{length} bytes at {memory.offset}"
                raise OSError(
                    errno.EINVAL, f"descriptor {memory.fd} has {found.st_size} bytes, wanted are {wanted}"
                )
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError(errno.EPERM, f"descriptor {memory.fd} is not sealed against shrinking")
            skip = memory.offset % mmap.ALLOCATIONGRANULARITY
            self._map = mmap.mmap(fd, length + skip, prot=mmap.PROT_READ, offset=memory.offset - skip)
        finally:
            os.close(fd)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.address = int(self._bytes.ctypes.data) + skip

    def close(self) -> None:
        """Unmap. Nothing may read through it any more."""
        del self._bytes
        self._map.close()


class Cookie:
    """Random bytes in a memfd of their own: whoever reads them back at the same place has found the same backend."""

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(_COOKIE_BYTES)
        self._map = memfd("kvd-cookie", mmap.PAGESIZE)
        self._map[:_COOKIE_BYTES] = self.secret
        view = np.frombuffer(self._map, np.uint8)
        self.address = int(view.ctypes.data)
        del view
        found = backing(Region(self.address, mmap.PAGESIZE))
        if found is None:
            raise OSError(errno.ENOENT, "a memfd is not found in /proc/self/maps")
        self.memory = found

    def close(self) -> None:
        """Make readers find nothing, those that have it mapped too. Idempotent."""
        if not self._map.closed:
            self._map[:_COOKIE_BYTES] = bytes(_COOKIE_BYTES)
            self._map.close()
            os.close(self.memory.fd)


def _mapping(region: Region) -> tuple[int, int] | None:
    """Inode and offset of the memfd that holds all of a region, from /proc/self/maps.

    The kernel splits a mapping where advice differs on parts of it, so several lines may be one memfd's.
    """
    reached, end = region.address, region.address + region.length
    found: set[tuple[int, int]] = set()
    with Path("/proc/self/maps").open() as lines:
        for line in lines:
            span, _, offset, _, inode, *path = line.split(maxsplit=5)
            first, last = (int(part, 16) for part in span.split("-"))
            if first <= reached < min(last, end):
                if not path or not path[0].startswith("/memfd:"):
                    return None
                found.add((int(inode), int(offset, 16) + region.address - first))
                reached = last
    return found.pop() if reached >= end and len(found) == 1 else None
