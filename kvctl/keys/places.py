"""Which files hold the keys of this host: those that its kvd uses, else the usual ones."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvctl import daemon
from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.errors import KvctlError
from kvd.addresses import join_address
from kvd.wire import query
from kvd.wire.names import SOCKET_NAME

PAIR = Path("/etc/kvd/host.keys")
LIST = Path("/etc/kvd/trusted.keys")
UNKNOWN = "HOST:PORT"
"""Stands for where this host's kvd is reached, which only a kvd with a peer socket can tell."""
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
    """The pair and the list, and where other hosts reach this one's kvd.

    ``public`` is the key that kvd runs with, empty where none answers or another pair is asked for. ``error`` says why
    kvd cannot read its list, ``in_force`` how many keys it lets in, ``twice`` which places have two keys in it. ``uid``
    is the user that kvd runs as, None where none answers.
    """

    pair: Path
    trusted: Path
    place: str
    public: str = ""
    error: str = ""
    in_force: int = 0
    twice: str = ""
    uid: int | None = None


def key_files(settings: Settings, pair: Path | None, trusted: Path | None) -> KeyFiles:
    """What is given, else what this host's kvd uses, else the usual files.

    Raises `KvctlError` where a kvd is named that does not answer, and no file: the usual ones are another's then.
    """
    kvd = None
    try:
        kvd = daemon.ask(settings, query.GetStatus(), query.KvdStatus)
    except KvctlError as error:
        if pair is None and trusted is None:
            if settings.runtime_dir or settings.socket:
                what = f"which key files it uses is not known: {error.message}"
                raise type(error)(what, "name the file: --list FILE or --key-file FILE", error.code) from None
            say(f"no kvd answers, so the usual files are taken: {PAIR} and {LIST}")
    keys = kvd.keys if kvd is not None else None
    if keys is not None and keys.identity == "shared" and trusted is None:
        say(
            "all hosts share this pair, and kvd follows no list: for a key for each host set"
            " peer.curve.authorized_keys in kvd.yaml (docs/deploy.md)"
        )
    public = keys.public if keys is not None and pair in (None, Path(keys.key_file)) else ""
    followed = keys is not None and trusted in (None, Path(keys.list_file))
    return KeyFiles(
        pair or Path((keys and keys.key_file) or PAIR),
        trusted or Path((keys and keys.list_file) or LIST),
        join_address(kvd.endpoint.host, kvd.endpoint.port)
        if kvd is not None and kvd.endpoint.port
        else UNKNOWN,
        public,
        keys.error if keys is not None and followed else "",
        keys.trusted if keys is not None and followed else 0,
        keys.twice if keys is not None and followed else "",
        _user_of_kvd(settings) if kvd is not None else None,
    )


def _user_of_kvd(settings: Settings) -> int | None:
    try:
        return (daemon.directory(settings) / SOCKET_NAME).stat().st_uid
    except OSError:
        return None


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
