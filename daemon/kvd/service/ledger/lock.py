"""One state directory, one kvd: a lock on a file in it, and one on the directory itself.

The file's can be taken by kvd's own user alone, but whoever deletes the file gets it out of the way. The directory's
stays as long as the directory; but every user who may list it can take it. So the first counts always, the second
where a process of kvd's own user or of root holds it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from kvd.service.errors import StartError
from kvd.service.flocks import holders

NAME = "ledger.lock"


@dataclass(frozen=True, slots=True)
class StateLock:
    """The lock of a directory; it lasts until `release`. Descriptors are of its file and of the directory."""

    directory: Path
    file: int
    place: int

    @property
    def lost(self) -> bool:
        """Whether its file or its directory is gone, or another one: it keeps nobody away any more."""
        return not (_same(self.file, self.directory / NAME) and _same(self.place, self.directory))

    def release(self) -> None:
        """Give it up."""
        os.close(self.file)
        os.close(self.place)


def take(directory: Path, runtime: str) -> StateLock:
    """Lock a directory for this process, which serves the runtime directory ``runtime``; make it where it is missing.

    Raises `StartError` where another kvd has it, and `OSError`, also where one has it that has ended and whose last
    call to this disk has not returned: the kernel gives up its locks after that.
    """
    directory.mkdir(mode=0o750, parents=True, exist_ok=True)
    with contextlib.ExitStack() as opened:
        place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, place)
        if not _locked(place) and (holder := _trusted_holder(place)):
            raise _taken(directory, str(holder))
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(directory / NAME, flags, 0o600)
        opened.callback(os.close, file)
        if not _locked(file):
            raise _taken(directory, os.pread(file, 4096, 0).decode(errors="replace"))
        with contextlib.suppress(OSError):  # a full disk: who holds it is for people
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n{runtime}\n".encode(), 0)
        opened.pop_all()
    return StateLock(directory, file, place)


def _taken(directory: Path, text: str) -> StartError | OSError:
    pid, _, runtime = text.strip().partition("\n")
    if pid.isdigit() and _ended(pid):
        return OSError(
            errno.EBUSY,
            f"process {pid} has ended and still holds it: the disk does not answer",
            str(directory),
        )
    if not runtime:
        with contextlib.suppress(OSError):
            runtime = (directory / NAME).read_text(errors="replace").strip().partition("\n")[2]
    serves = f" and serves {runtime}" if runtime.isprintable() and runtime else ""
    return StartError(
        f"another kvd (process {pid if pid.isdigit() else 'unknown'}) keeps its ledger in {directory}{serves}",
        hint="stop it first, or give another --state-dir",
    )


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: there is nothing to hold
    return True


def _trusted_holder(descriptor: int) -> int:
    """The process of kvd's own user, or of root, that has locked this file; 0 where there is none."""
    for pid in holders(descriptor):
        with contextlib.suppress(OSError):
            if pid != os.getpid() and Path(f"/proc/{pid}").stat().st_uid in (0, os.geteuid()):
                return pid
    return 0


def _ended(pid: str) -> bool:
    """Whether only threads are left of a process that are within the kernel: it does nothing more by itself."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return False


def _same(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat()
    except OSError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)
