"""Contexts: fleets by name, each with its hosts and a directory of keys, in a file of the user's own.

The file is written by hand; which context is in use stands in a file beside it, so that comments stay.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvctl.cli.parsing import near_misses
from kvctl.errors import KvctlError, NotPermitted, UsageError
from kvd.addresses import split_address

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
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise UsageError(
            f"{path} holds no contexts: {' '.join(str(error).split())}", f"write it as {EXAMPLE}"
        ) from None
    for name, context in found.items():
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


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"cannot read {path}: {reason}", "give it to this user") from None
