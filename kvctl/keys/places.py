"""Which files hold the keys of this host: those that its kvd uses, else the usual ones."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from kvctl import daemon
from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.errors import KvctlError
from kvctl.processes.supervisor import start_again
from kvd.addresses import join_address
from kvd.client.errors import TimedOut
from kvd.wire import query
from kvd.wire.names import SOCKET_NAME

PAIR = Path("/etc/kvd/host.keys")
LIST = Path("/etc/kvd/trusted.keys")
UNKNOWN = "HOST:PORT"
"""Stands for where this host's kvd is reached, which only a kvd with a peer socket can tell."""
IN_FORCE_SECONDS = 2.0
"""kvd looks at its list five times a second."""
TAKEN = "has taken note"
NOTHING_NEW = "has nothing to take note of"

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
    is the user that kvd runs as, None where none answers, and ``restart`` what starts it again.
    """

    pair: Path
    trusted: Path
    place: str
    public: str = ""
    error: str = ""
    in_force: int = 0
    twice: str = ""
    uid: int | None = None
    restart: str = ""


def key_files(settings: Settings, pair: Path | None, trusted: Path | None) -> KeyFiles:
    """What is given, else what this host's kvd uses, else the usual files.

    Raises `KvctlError` where a kvd is named that does not answer, or one is there and hangs, and no file is named: the
    usual ones are another's then.
    """
    daemon.refuse_afar(settings)
    kvd = None
    try:
        kvd = daemon.ask(settings, query.GetStatus(), query.KvdStatus)
    except KvctlError as error:
        if pair is None and trusted is None:
            named = settings.runtime_dir or settings.socket or os.environ.get("KVD_RUNTIME_DIR")
            if named or isinstance(error.__cause__, TimedOut):
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
        start_again(kvd.pid) if kvd is not None else "",
    )


def _user_of_kvd(settings: Settings) -> int | None:
    try:
        return (daemon.directory(settings) / SOCKET_NAME).stat().st_uid
    except OSError:
        return None


@dataclass(frozen=True)
class Follows:
    """The list that this host's kvd follows, None where it follows none, and how often it took note of a change.

    ``unknown`` says why that is not known; ``revoked`` are keys that were not let in since they were revoked, each with
    what is known of that.
    """

    list_file: Path | None = None
    changes: int = 0
    unknown: str = ""
    revoked: Mapping[str, str] = field(default_factory=dict)


def kvd_follows(settings: Settings) -> Follows:
    """What this host's kvd says of its list."""
    try:
        kvd = daemon.ask(settings, query.GetStatus(), query.KvdStatus)
    except KvctlError as error:
        return Follows(unknown=error.message)
    followed = kvd.keys.list_file if kvd.keys is not None else ""
    return Follows(
        Path(followed) if followed else None,
        kvd.counters.get("keys.changes", 0),
        revoked={one.key: f"it was {one.was}" for one in kvd.refused if one.was},
    )


def taken_note(settings: Settings, path: Path, before: Follows) -> str:
    """Wait until kvd has taken note of a change of ``path``; `TAKEN`, or why it has not."""
    if before.unknown:
        return f"not known whether it has taken note: {before.unknown}"
    if before.list_file is None:
        return "follows no list of keys"
    if before.list_file.resolve() != path.resolve():
        return f"follows another file: {before.list_file}"
    until = time.monotonic() + IN_FORCE_SECONDS
    while time.monotonic() < until:
        now = kvd_follows(settings)
        if now.changes > before.changes:
            return TAKEN
        if now.unknown:
            return f"not known whether it has taken note: {now.unknown}"
        time.sleep(0.02)
    return f"has not taken note within {IN_FORCE_SECONDS:g} s: see kvctl doctor"
