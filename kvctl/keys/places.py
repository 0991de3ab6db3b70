"""Which files hold the keys of this host: those that its kvd uses, else the usual ones."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvctl import daemon
from kvctl.cli.settings import Settings
from kvctl.errors import KvctlError
from kvd.addresses import join_address
from kvd.wire import query

PAIR = Path("/etc/kvd/host.keys")
LIST = Path("/etc/kvd/trusted.keys")
IN_FORCE_SECONDS = 2.0
"""kvd looks at its list five times a second."""

PairFile = Annotated[
    Path | None, typer.Option("--key-file", metavar="FILE", help=f"This host's pair. [what kvd uses; {PAIR}]")
]
ListFile = Annotated[
    Path | None, typer.Option("--list", metavar="FILE", help=f"The trusted keys. [what kvd uses; {LIST}]")
]


@dataclass(frozen=True)
class KeyFiles:
    """The pair and the list, and where other hosts reach this one's kvd; ``place`` is empty where that is not known."""

    pair: Path
    trusted: Path
    place: str


def key_files(settings: Settings, pair: Path | None, trusted: Path | None) -> KeyFiles:
    """What is given, else what this host's kvd uses, else the usual files."""
    kvd = _status(settings)
    keys = kvd.keys if kvd is not None else None
    return KeyFiles(
        pair or Path((keys and keys.key_file) or PAIR),
        trusted or Path((keys and keys.list_file) or LIST),
        join_address(kvd.endpoint.host, kvd.endpoint.port)
        if kvd is not None and kvd.endpoint.port
        else socket.gethostname(),
    )


def changes_seen(settings: Settings) -> tuple[Path, int] | None:
    """The list that this host's kvd follows, and how often it took note of a change; None where it follows none."""
    kvd = _status(settings)
    if kvd is None or kvd.keys is None or not kvd.keys.list_file:
        return None
    return Path(kvd.keys.list_file), kvd.counters.get("keys.changes", 0)


def in_force(settings: Settings, path: Path, before: tuple[Path, int] | None) -> bool:
    """Wait until kvd has taken note of a change of ``path``; False where it does not follow that file."""
    if before is None or before[0].resolve() != path.resolve():
        return False
    until = time.monotonic() + IN_FORCE_SECONDS
    while time.monotonic() < until:
        if (now := changes_seen(settings)) is not None and now[1] > before[1]:
            return True
        time.sleep(0.02)
    return False


def _status(settings: Settings) -> query.KvdStatus | None:
    try:
        return daemon.ask(settings, query.GetStatus(), query.KvdStatus)
    except KvctlError:
        return None
