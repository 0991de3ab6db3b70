"""Who listens where on this host, and who will want to, by way of /proc."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LISTEN = "0A"
"""TCP's state of a socket that accepts connections, as the kernel writes it."""
ACCEPTS = 0x10000
"""The flag of a Unix socket that accepts connections."""
ANYWHERE = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to


@dataclass(frozen=True, slots=True)
class OpenSocket:
    """A socket that accepts connections: ``host`` and ``port``, or the ``path`` of a Unix socket.

    ``pids`` are the processes that have it open, none where this user may not see that; ``uid`` is whose it is, -1
    where the kernel does not say.
    """

    host: str
    port: int
    path: str
    pids: tuple[int, ...]
    uid: int


@dataclass(frozen=True, slots=True)
class Program:
    """A process: what it was started with, and of its environment what this user may see."""

    pid: int
    words: tuple[str, ...]
    environment: Mapping[str, str]


def listeners(proc: Path = PROC) -> list[OpenSocket]:
    """All listening TCP and Unix sockets of this network namespace, by port and path."""
    holders = _holders(proc)
    found = [
        OpenSocket(host, port, "", tuple(holders.get(inode, ())), uid)
        for name in ("tcp", "tcp6")
        for host, port, uid, inode in _tcp(proc / "net" / name)
    ]
    found += [
        OpenSocket("", 0, path, tuple(holders.get(inode, ())), -1) for path, inode in _unix(proc / "net/unix")
    ]
    return sorted(found, key=lambda one: (one.port, one.host, one.path))


def ancestry(pid: int, proc: Path = PROC) -> tuple[int, ...]:
    """A process and those above it, without the first one of the system, which is above all."""
    found = [pid]
    while True:
        try:
            # The name of the program, in parentheses, may hold anything.
            pid = int((proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            return tuple(found)
        if pid <= 1 or pid in found:
            return tuple(found)
        found.append(pid)


def programs(word: str, proc: Path = PROC) -> Iterator[Program]:
    """The processes of this network namespace with ``word`` in what they were started with."""
    here = _namespace(proc / "self")
    for place in sorted(proc.glob("[0-9]*"), key=lambda place: int(place.name)):
        words = _words(place / "cmdline")
        if not any(word in one for one in words) or _namespace(place) not in ("", here):
            continue
        pairs = (one.partition("=") for one in _words(place / "environ"))
        yield Program(int(place.name), tuple(words), {name: value for name, _, value in pairs})


def command(pid: int, proc: Path = PROC) -> str:
    """The name of a process as the kernel has it; empty where it is gone."""
    try:
        return (proc / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def ephemeral(proc: Path = PROC) -> tuple[int, int] | None:
    """The ports that the kernel gives to outgoing connections; None where that cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        first, last = (proc / "sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(first), int(last)
    return None


def overlap(one: str, other: str) -> bool:
    """Whether two sockets on these addresses cannot have the same port, apart from what sockets may allow."""
    return one == other or one in ANYWHERE or other in ANYWHERE


def _namespace(place: Path) -> str:
    try:
        return str((place / "ns/net").readlink())
    except OSError:
        return ""


def _words(file: Path) -> list[str]:
    try:
        return [word for word in file.read_text(errors="replace").split("\0") if word]
    except OSError:  # it ended, or is another user's
        return []


def _holders(proc: Path) -> dict[int, list[int]]:
    """The processes that have each socket open, by its inode, as far as this user may look."""
    found: dict[int, list[int]] = {}
    for place in proc.glob("[0-9]*/fd"):
        pid = int(place.parent.name)
        with contextlib.suppress(OSError):
            for descriptor in place.iterdir():
                with contextlib.suppress(OSError):
                    target = str(descriptor.readlink())
                    if target.startswith("socket:["):
                        pids = found.setdefault(int(target[8:-1]), [])
                        if pid not in pids:
                            pids.append(pid)
    return {inode: sorted(pids) for inode, pids in found.items()}


def _tcp(table: Path) -> Iterator[tuple[str, int, int, int]]:
    for row in _rows(table):
        if row[3] == LISTEN:
            host, _, port = row[1].partition(":")
            yield _address(host), int(port, 16), int(row[7]), int(row[9])


def _unix(table: Path) -> Iterator[tuple[str, int]]:
    for row in _rows(table, 7):
        # Whoever binds a name chooses it, newlines included, so a line may be anything.
        with contextlib.suppress(ValueError):
            if len(row) > 7 and int(row[3], 16) & ACCEPTS:
                yield row[7], int(row[6])


def _rows(table: Path, most: int = -1) -> Iterator[list[str]]:
    with contextlib.suppress(OSError):
        for line in table.read_text(errors="replace").split("\n")[1:]:
            if line:
                yield line.split(None, most)


def _address(text: str) -> str:
    """As the kernel writes it: words of four bytes, each in the machine's order."""
    packed = b"".join(
        int(text[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(text), 8)
    )  # fmt: skip
    if len(packed) == 4:
        return socket.inet_ntop(socket.AF_INET, packed)
    address = ipaddress.IPv6Address(packed)
    return str(address.ipv4_mapped or address)
