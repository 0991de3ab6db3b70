"""Changes to the list of trusted keys, each in one step, one after the other."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kvctl.errors import CheckFailed, KvctlError, NotPermitted, RefusedError, UsageError
from kvd.keys import (
    ANY_PORT,
    KEY_BYTES,
    KeyFileError,
    TrustedKey,
    read_lines,
    read_trusted,
    trusted_key,
    write_trusted,
)

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
REVOKED = "revoked "
AS_OWNER = "type it as root, or as the user that kvd runs as"


@dataclass(frozen=True)
class Change:
    """What stands in a list now, and what of it is new or gone; ``revoked`` says when a key that is new was revoked."""

    trusted: tuple[TrustedKey, ...]
    added: tuple[TrustedKey, ...] = ()
    removed: tuple[TrustedKey, ...] = ()
    revoked: str = ""


def listed(path: Path) -> tuple[TrustedKey, ...]:
    """What stands in a list, nothing where there is none. Raises `KvctlError`."""
    with _told(path):
        return read_trusted(path) if path.exists() else ()


def trust(path: Path, key: str, place: str, *, replace: bool) -> Change:
    """Let a key in, of the host at ``place`` (``host``, ``host:port``, or empty).

    Raises `UsageError` for what is no key or no place, `RefusedError` where that host has another key already and it is
    not to be replaced, `KvctlError` where the list cannot be read or written.
    """
    try:
        new = trusted_key(key, place, path)
    except KeyFileError as error:
        first = "the key comes first: " if len(place) == KEY_BYTES else ""
        raise UsageError(
            error.message.removeprefix(f"{path}: the new line: "),
            f"{first}write kvctl keys trust 'KEY' HOST:PORT, without blanks in either",
        ) from None
    if not _is_host(new.host):
        raise UsageError(
            f"{place!r} is no host and port: {new.host!r} is neither a name nor an address",
            "write what that host's peer.advertise says, as 10.0.0.8:7766",
        )
    with _told(path), _alone(path):
        before = listed(path)
        others = tuple(one for one in before if one.key != new.key and _overlap(one, new))
        if others and not replace:
            raise RefusedError(
                f"{new.place} has the key {others[0].key.decode()} already, given was {new.key.decode()}",
                "if that host has a new pair: add --replace",
            )
        kept = tuple(one for one in before if one not in others)
        added = () if new in kept else (new,)
        if added or others:
            write_trusted(path, (*kept, *added), comments=map(_note, others))
        known = any(one.key == new.key for one in before)
        return Change((*kept, *added), added, others, "" if known else revoked_when(path, new.key.decode()))


def revoke(path: Path, what: str) -> Change:
    """Let a key, or whatever is at a host or ``host:port``, in no more.

    Raises `CheckFailed` where nothing of that name is trusted, `KvctlError` where the list cannot be read or written.
    """
    what = what.strip()
    with _told(path), _alone(path):
        before = listed(path)
        if not path.exists():
            raise CheckFailed(
                f"there is no file {path}, so nothing was revoked; a kvd that follows it still lets in whom it"
                " let in before",
                f"to let nobody in: touch {path}; then trust the others again. Is it another file: --list FILE",
            )
        gone = tuple(one for one in before if what in (one.key.decode(), one.host, one.place))
        if not gone:
            raise CheckFailed(
                f"{path} trusts no key and no host {what!r}", "kvctl keys show lists those that it does"
            )
        # The key is let in by any line that has it: it goes with all its lines.
        keys = {one.key for one in gone}
        gone = tuple(one for one in before if one.key in keys)
        kept = tuple(one for one in before if one.key not in keys)
        write_trusted(path, kept, comments=map(_note, gone))
        return Change(kept, removed=gone)


def revoked_when(path: Path, key: str) -> str:
    """When a key was last revoked in a list, and where it was, as its comments have it; empty: it was not."""
    begin = f"# {REVOKED}"
    notes = [line.removeprefix(begin).split() for line in read_lines(path) if line.startswith(begin)]
    times = [f"{note[0]}, when it was {note[2]}" for note in notes if len(note) == 3 and note[1] == key]
    return times[-1] if times else ""


def _note(one: TrustedKey) -> str:
    """The comment that a list keeps of a key that was revoked."""
    return f"{REVOKED}{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {one.key.decode()} {one.place or '-'}"


def _is_host(host: str) -> bool:
    """Whether that may be a host; empty is none, which is allowed."""
    try:
        return not host or bool(_NAME.fullmatch(host)) or bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def _overlap(one: TrustedKey, other: TrustedKey) -> bool:
    """Whether two lines say whose key is at the same place."""
    if not one.host or one.host != other.host:
        return False
    return one.port == other.port or ANY_PORT in (one.port, other.port)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Nobody else changes a list in that directory meanwhile: what is replaced cannot be locked itself."""
    directory = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Errors of files as kvctl tells them."""
    try:
        yield
    except KeyFileError as error:
        if isinstance(error.__context__, PermissionError):
            raise NotPermitted(error.message, AS_OWNER) from None
        kept = "nothing was changed, and a kvd that follows it still lets in whom it let in before"
        raise KvctlError(
            f"{error.message}; {kept}", error.hint or f"correct {path}, then try again"
        ) from None
    except FileNotFoundError as error:
        raise UsageError(f"there is no directory {error.filename}", f"mkdir -p {error.filename}") from None
    except PermissionError as error:
        raise NotPermitted(f"{error.filename}: {error.strerror}", AS_OWNER) from None
