"""The files of a database: which they are, and how they are set aside so that nothing of them is lost.

A file that is set aside is called ``NAME.damaged-TIME`` until all that can be read of it was taken over, then
``NAME.broken-TIME``. Of those that are called so the newest `KEPT` stay, or fewer where they are large. Nothing else
here deletes any.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

DAMAGED, BROKEN, NEWER = ".damaged-", ".broken-", ".schema-"
KEPT = 4
"""Each has up to ``ledger.max_bytes``: a disk that damages one after the other must not be filled by them."""
COMPANIONS = ("-wal", "-shm")
"""What SQLite keeps beside a database: its log, which holds the newest records, and the log's index."""

MOST_TOLD = 16

FileIdentity = tuple[tuple[int, int] | None, ...]
"""Device and inode of a database and its companions, None for what is not there."""


def identity(path: Path) -> FileIdentity:
    """Which files stand under these names now."""
    return tuple(_inode(Path(f"{path}{suffix}")) for suffix in ("", *COMPANIONS))


def odd(path: Path) -> bool:
    """Whether something stands there that no database can be: a directory, a pipe."""
    return path.exists() and not path.is_file()


def set_aside(path: Path, name: str = "") -> Path | None:
    """Rename a database and its companions; where to, None where there is none. Raises `OSError`.

    The log goes first: beside a new database of the old name it would be taken for that one's. Where the process dies
    in between, `complete` does the rest.
    """
    if not any(identity(path)):
        return None
    aside = path.with_name(name or f"{path.name}{DAMAGED}{time.time_ns()}")
    done: list[str] = []
    try:
        for suffix in (*COMPANIONS, ""):
            if os.path.lexists(f"{path}{suffix}"):
                Path(f"{path}{suffix}").rename(f"{aside}{suffix}")
                done.append(suffix)
    except OSError:
        for suffix in done:  # a log belongs to its database: both stay, or both go
            with contextlib.suppress(OSError):
                Path(f"{aside}{suffix}").rename(f"{path}{suffix}")
        raise
    sync(path.parent)
    return aside


def complete(path: Path) -> None:
    """Finish what a `set_aside` that was cut short has begun: a log without its database. Raises `OSError`."""
    for log in path.parent.glob(f"{path.name}{DAMAGED}*-wal"):
        aside = log.with_name(log.name.removesuffix("-wal"))
        if not aside.exists() and path.exists():
            path.rename(aside)


def waiting(path: Path, schema: int) -> list[Path]:
    """Databases that were set aside and not read yet, the oldest first; also one that was too new for an older kvd."""
    found = [
        p
        for p in path.parent.glob(f"{path.name}{DAMAGED}*")
        if not p.name.endswith((*COMPANIONS, "-journal"))
    ]
    found += [
        p
        for p in path.parent.glob(f"{path.name}{NEWER}*")
        if (number := p.name.removeprefix(path.name + NEWER).partition("-")[0]).isdigit()
        and int(number) <= schema
    ]
    return sorted(found, key=lambda p: p.name.rpartition("-")[2])


def aside(path: Path) -> tuple[str, ...]:
    """The names of the last `MOST_TOLD` that were set aside for damage and still lie there, the newest last."""
    names = [
        found.name
        for mark in (DAMAGED, BROKEN)
        for found in path.parent.glob(f"{path.name}{mark}*")
        if not found.name.endswith((*COMPANIONS, "-journal"))
    ]
    return tuple(sorted(names, key=lambda name: name.rpartition("-")[2])[-MOST_TOLD:])


def settle(aside: Path, path: Path, most: int) -> Path:
    """All that could be read of it was taken over; its name says so from now on. Raises `OSError`.

    The newest such file stays, and further ones with it while all have at most ``most`` bytes.
    """
    kept = set_aside(aside, f"{path.name}{BROKEN}{aside.name.rpartition('-')[2]}")
    _delete_oldest(path, most)
    return kept or aside


def _delete_oldest(path: Path, most: int) -> None:
    """Of what was taken over delete all but the newest. What is no file was none of ours, and stays."""
    broken = [p for p in path.parent.glob(f"{path.name}{BROKEN}*") if p.is_file()]
    databases = [p for p in broken if not p.name.endswith((*COMPANIONS, "-journal"))]
    total = 0
    for at, old in enumerate(sorted(databases, key=lambda p: p.name.rpartition("-")[2], reverse=True)):
        files = [one for suffix in ("", *COMPANIONS, "-journal") if (one := Path(f"{old}{suffix}")).is_file()]
        total += sum(one.stat().st_size for one in files)
        if at and (at >= KEPT or total > most):
            for one in files:
                one.unlink(missing_ok=True)


def sync(directory: Path) -> None:
    """Have the names in a directory on disk. Raises `OSError`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
