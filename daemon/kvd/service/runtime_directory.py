"""The runtime directory: one kvd holds it, and notices when it is taken away."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from kvd.service.errors import StartError
from kvd.service.flocks import holders
from kvd.wire.names import EVENTS_NAME, SOCKET_NAME

LOCK_NAME = "kvd.lock"
LONGEST_PATH = 107
"""Bytes of a Unix socket's path that the kernel takes."""


@dataclass(frozen=True, slots=True)
class RuntimeDirectory:
    """A directory that this process holds. ``sockets`` are the files in it that are kvd's, by name, as (device, inode).

    The lock is on the directory itself: unlike a file in it, it cannot be removed and made anew beside one that holds
    the old one.
    """

    path: Path
    descriptor: int
    sockets: dict[str, tuple[int, int]] = field(default_factory=dict)

    def note_sockets(self) -> None:
        """The sockets are bound: from now on `lost` looks for them too."""
        for name in (SOCKET_NAME, EVENTS_NAME):
            self.sockets[name] = _identity(os.stat(name, dir_fd=self.descriptor))

    def lost(self) -> str:
        """Why new clients do not reach this kvd any more, or nothing."""
        try:
            found = _identity(self.path.stat())
        except OSError as error:
            return f"{self.path} cannot be found any more: {error.strerror}"
        held = os.fstat(self.descriptor)
        # In a mount namespace of its own (systemd's) it stands at its path for kvd alone, and has no name elsewhere.
        if found != _identity(held) or not held.st_nlink:
            return f"{self.path} was removed, or another directory stands in its place"
        for name, identity in self.sockets.items():
            try:
                found = _identity(os.stat(name, dir_fd=self.descriptor))
            except OSError as error:
                return f"{self.path / name} cannot be found any more: {error.strerror}"
            if found != identity:
                return f"{self.path / name} is not the socket that this kvd bound"
        return ""


@contextlib.contextmanager
def hold(path: Path) -> Iterator[RuntimeDirectory]:
    """Make the runtime directory and keep every other kvd from it.

    Raises `StartError`: not ours to use, open to everyone, path too long, or another kvd has it.
    """
    longest = max(len(os.fsencode(path / name)) for name in (SOCKET_NAME, EVENTS_NAME))
    if longest > LONGEST_PATH:
        raise StartError(
            f"runtime directory {path}: the socket's path has {longest} bytes, at most {LONGEST_PATH} are taken",
            hint="give a shorter one with --runtime-dir",
        )
    with contextlib.ExitStack() as stack:
        try:
            path.mkdir(mode=0o750, parents=True, exist_ok=True)
            mode = path.stat().st_mode & 0o777
            if mode & 0o007:
                raise StartError(
                    f"runtime directory {path} has mode {mode:04o}: every user of this host could order kvd about",
                    hint=f"chmod 0750 {path}, or give another with --runtime-dir",
                )
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            holder = stack.enter_context((path / LOCK_NAME).open("a+"))
        except OSError as error:
            raise StartError(
                f"runtime directory {path} cannot be used: {error.strerror}",
                hint="give another with --runtime-dir",
            ) from None
        _lock(path, descriptor, holder)
        yield RuntimeDirectory(path, descriptor)


def _lock(path: Path, descriptor: int, holder: IO[str]) -> None:
    try:
        # The file's lock is the one that a kvd of before holds; it tells who holds the directory's.
        for lock in (descriptor, holder.fileno()):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder.seek(0)
        pid = holder.read().strip() or next(map(str, holders(descriptor)), "unknown")
        raise StartError(
            f"another kvd (process {pid}) serves {path}",
            hint="stop it first, or give another --runtime-dir",
        ) from None
    holder.truncate(0)
    holder.write(str(os.getpid()))
    holder.flush()


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
