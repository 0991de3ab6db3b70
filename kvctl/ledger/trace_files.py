"""Where traces are: files by path, imported ones by name."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvctl.cli.parsing import near_misses
from kvctl.errors import CheckFailed, UsageError
from kvd.trace.errors import TraceError

SUFFIX = ".jsonl.gz"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def folder() -> Path:
    """Where imported traces stand: ``$KVCTL_TRACES``, else below the user's own data."""
    if given := os.environ.get("KVCTL_TRACES"):
        return Path(given)
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "kvctl" / "traces"


def kept() -> dict[str, Path]:
    """The imported traces by name."""
    return {label(path): path for path in sorted(folder().glob(f"*{SUFFIX}"))}


def label(path: Path) -> str:
    """The name of an imported trace."""
    return path.name.removesuffix(SUFFIX)


def place_of(name: str) -> Path:
    """Where the trace of that name is kept, or will be. Raises `UsageError` for what cannot be a name."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be a trace's name", "use letters, digits, dots and dashes; give one with --name"
        )
    return folder() / f"{name}{SUFFIX}"


def found(text: str) -> Path:
    """The trace that ``text`` names: a file, ``-`` for stdin, or an imported one. Raises `UsageError`."""
    if text == "-" or Path(text).expanduser().exists():
        return Path(text).expanduser()
    names = kept()
    if text in names:
        return names[text]
    raise UsageError(
        f"no trace {text!r}: no file of that name, and none was imported as it"
        + (f"; {near_misses(text, names)}" if names else ""),
        "kvctl trace show lists the imported ones, kvctl trace export writes one",
    )


def failed(error: TraceError) -> CheckFailed:
    """What a command says of a trace that cannot be used."""
    return CheckFailed(error.message, error.hint, error.code)
