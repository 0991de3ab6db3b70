"""A worker to be read directly: prints one JSON line with its metadata and address, then obeys lines on stdin.

The only argument is JSON: ``size`` in bytes, ``memfd`` (true, false, or "unsealed"), ``uid`` to run as (or null),
``dumpable``. Orders: ``close`` the backend, ``unmap`` the upper half of the memory; each is answered with a line.
"""

import ctypes
import json
import mmap
import os
import sys

import numpy as np

from kvd.backends.direct.backend import open_backend  # before another user may not read our modules
from kvd.backends.direct.memfd import memfd
from kvd.geometry.model import Region
from tests.support.backend_peer import pattern

PR_SET_DUMPABLE = 4


def memory_of(kind: bool | str, size: int) -> mmap.mmap:
    if kind == "unsealed":
        fd = os.memfd_create("unsealed")
        os.ftruncate(fd, size)
        return mmap.mmap(fd, size)
    return memfd("test", size) if kind else mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def main() -> None:
    wanted = json.loads(sys.argv[1])
    size = wanted["size"]
    libc = ctypes.CDLL(None)
    if wanted["uid"] is not None:
        os.setgroups([])
        os.setresgid(wanted["uid"], wanted["uid"], wanted["uid"])
        os.setresuid(wanted["uid"], wanted["uid"], wanted["uid"])
    # The kernel makes a process that changed its user not dumpable, as it may hold what the former user had.
    libc.prctl(PR_SET_DUMPABLE, int(wanted["dumpable"]), 0, 0, 0)
    backend = open_backend("peer", options={})
    held = memory_of(wanted["memfd"], size)
    memory = np.frombuffer(held, np.uint8)
    memory[:] = pattern(size)
    backend.register([Region(memory.ctypes.data, size)])
    print(json.dumps({"metadata": backend.metadata().hex(), "address": memory.ctypes.data}), flush=True)  # noqa: T201
    for line in sys.stdin:
        if line == "close\n":
            backend.close()
        elif line == "unmap\n":
            libc.munmap(ctypes.c_void_p(memory.ctypes.data + size // 2), ctypes.c_size_t(size // 2))
        print("done", flush=True)  # noqa: T201
    backend.close()


if __name__ == "__main__":
    main()
