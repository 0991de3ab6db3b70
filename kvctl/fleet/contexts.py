"""Contexts: fleets by name, each with its hosts and a directory of keys, in a file of the user's own.

The file is written by hand; which context is in use stands in a file beside it, so that comments stay.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvctl.cli.parsing import near_misses
from kvctl.errors import KvctlError, NotPermitted, UsageError
from kvd.addresses import split_address
from kvd.shown import brief

MOST_BYTES = 1 << 20
"""Of a file here: 10,000 hosts have half of it."""
FILE, IN_USE = "contexts.yaml", "context"
PAIR, LIST = "host.keys", "trusted.keys"
"""In a context's directory of keys, as kvctl keys generate and trust write them with --key-file and --list."""
EXAMPLE = "contexts: {NAME: {keys: DIRECTORY, hosts: [HOST:PORT]}}"


class Context(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fleet. Without ``keys`` its hosts have none, which kvds take on loopback only.

    Without ``hosts`` they are the places in the list of trusted keys.
    """

    keys: str = ""
    hosts: Annotated[tuple[str, ...], Meta(max_length=65536)] = ()

    @property
    def pair(self) -> Path:
        """The pair that this user speaks with."""
        return Path(self.keys).expanduser() / PAIR

    @property
    def trusted(self) -> Path:
        """The keys of the hosts."""
        return Path(self.keys).expanduser() / LIST


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    contexts: dict[str, Context] = {}


def directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the files of contexts lie."""
    return Path(environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser(), "kvctl")


def contexts() -> dict[str, Context]:
    """All contexts, by name; none where there is no file. Raises `UsageError` naming the file and what is wrong."""
    path = directory() / FILE
    text = _text(path)
    import yaml

    try:
        tree: Any = yaml.safe_load(text) or {}
        found = msgspec.convert(tree, _File).contexts
    except (yaml.YAMLError, msgspec.ValidationError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} holds no contexts: {brief(' '.join(str(error).split()))}", f"write it as {EXAMPLE}"
        ) from None
    for name, context in found.items():
        _check_keys(path, name, context)
        for host in context.hosts:
            try:
                split_address(host)
            except ValueError as error:
                raise UsageError(f"{path}: context {name!r}: {error}", f"write it as {EXAMPLE}") from None
    return found


def in_use() -> str:
    """The name of the context that kvctl context use chose; empty where none was."""
    return _text(directory() / IN_USE).strip()


def use(name: str) -> None:
    """Use that context from now on, none where ``name`` is empty. Raises `UsageError` for one that there is not."""
    if name:
        named(name)
    path = directory() / IN_USE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_text(f"{name}\n", encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        kind = NotPermitted if isinstance(error, PermissionError) else KvctlError
        raise kind(
            f"cannot write {path}: {error.strerror}", "set XDG_CONFIG_HOME to a directory of yours"
        ) from None


def named(name: str) -> Context:
    """The context of that name. Raises `UsageError`."""
    known = contexts()
    if name not in known:
        path = directory() / FILE
        raise UsageError(
            f"there is no context {name!r}; {near_misses(name, known) or f'{path} holds none'}",
            f"contexts stand in {path}: {EXAMPLE}",
        )
    return known[name]


def _check_keys(path: Path, name: str, context: Context) -> None:
    try:
        os.lstat(context.pair)
    except OSError:  # it is told of where the keys are wanted
        return
    except (RuntimeError, ValueError) as error:  # the ~ of a user that there is not; a zero byte
        raise UsageError(
            f"{path}: context {name!r}: keys: {context.keys!r} is no directory: {error}",
            f"write it as {EXAMPLE}",
        ) from None


def _text(path: Path) -> str:
    """What a file holds, empty where there is none. A FIFO or a device is refused, and so never waited for."""
    try:
        # Not opened before it is known to be a file: opening a device may do something.
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"cannot read {path}: it is no regular file", "put a file there, or nothing")
        with open(path, "rb", opener=_at_once) as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise UsageError(
                f"cannot read {path}: it has more than {MOST_BYTES:,} bytes",
                "split it: XDG_CONFIG_HOME names another directory",
            )
        return text.decode()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except UnicodeDecodeError:
        raise UsageError(f"cannot read {path}: not UTF-8", "write it anew, as UTF-8") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "give it to this user") from None


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
