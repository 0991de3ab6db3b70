"""Whose locks (flock) stand on a file or a directory, as the kernel lists them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

LOCKS = Path("/proc/locks")


def holders(descriptor: int) -> Iterator[int]:
    """The processes that hold one. One in another PID namespace has no number here, and is left out."""
    inode = str(os.fstat(descriptor).st_ino)
    with contextlib.suppress(OSError):
        for line in LOCKS.read_text().splitlines():
            # Number, kind, mode, access, process, device and inode: proc_locks(5).
            parts = line.split()
            if len(parts) >= 6 and parts[1] == "FLOCK" and parts[5].rpartition(":")[2] == inode:
                pid = int(parts[4]) if parts[4].isdigit() else 0
                if pid:
                    yield pid
