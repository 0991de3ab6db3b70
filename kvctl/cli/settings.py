"""What holds for every command: output format, colour, timeout, which kvd. Flags over KVCTL_* over the config file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from kvctl.cli.parsing import near_misses, one_of, seconds
from kvctl.errors import UsageError

if TYPE_CHECKING:
    from kvd.client.remote import RemoteKvd

OutputFormat = Literal["table", "wide", "json", "jsonl", "yaml", "dot", "mermaid", "svg", "name", "folded"]
ColorMode = Literal["auto", "always", "never"]

OUTPUT_FORMATS = ("table", "wide", "json", "jsonl", "yaml")
DRAWINGS = ("dot", "mermaid", "svg")
"""Forms in which only some documents can be had."""
NAMES = ("name",)
"""The form in which lists can be had: what each item is called, one a line, as other commands take it."""
FOLDED = ("folded",)
"""The form in which long lists can be had: rows that are alike as one."""
TABLES = ("table", "wide", "folded")
"""Forms for people."""
COLOR_MODES = get_args(ColorMode)
KVDS = (
    "state_dir", "log_level", "drain_seconds", "local", "peer", "membership", "liveness", "leases", "ledger", "orders",
    "access", "metrics", "tracing",
)  # fmt: skip
"""Keys of kvd's own settings."""
OF_KVD = "that is a setting of kvd (kvd --config); kvctl has a file of its own: docs/cli.md"
DEFAULT_TIMEOUT = 5.0
"""Seconds that a command waits for an answer."""


T = TypeVar("T")


@dataclass(frozen=True)
class Given:
    """The values of one level: flags, environment or file. ``None`` where the level says nothing.

    ``origin`` says in an error where the value stood.
    """

    output: str | None = None
    color: str | None = None
    timeout: str | None = None
    runtime_dir: str | None = None
    socket: str | None = None
    host: str | None = None
    context: str | None = None
    config: str | None = None
    origin: str = "the command line"

    def name_of(self, key: str) -> str:
        """How the operator knows the value ``key`` of this level."""
        if self.origin == "environment":
            return _variable(key)
        if self.origin == "the command line":
            return "--" + key.replace("_", "-")
        return f"{key} in {self.origin}"


@dataclass(frozen=True)
class Settings:
    """The settled values. ``timeout`` is in seconds; ``timeout_given`` says that somebody asked for it.

    ``socket`` is what --socket or its like named (a path or a ZMQ address), ``runtime_dir`` the directory; both
    ``None`` means the default of `kvd.wire.names.runtime_dir`. ``host`` is another host whose kvd is asked, and
    ``context`` names where its keys are; ``context_typed`` says that it is meant for this command. ``remote`` is that
    kvd once it is known how to ask it, and ``deadline`` when all questions to it are over, in monotonic seconds.
    """

    output: OutputFormat = "table"
    color: ColorMode = "auto"
    timeout: float = DEFAULT_TIMEOUT
    timeout_given: bool = False
    runtime_dir: str | None = None
    socket: str | None = None
    host: str | None = None
    context: str | None = None
    context_typed: bool = False
    remote: RemoteKvd | None = None
    deadline: float | None = None


KEYS = tuple(f.name for f in fields(Given) if f.name not in ("config", "origin"))
"""The names that a config file may hold."""


def resolve(flags: Iterable[Given], environ: Mapping[str, str], drawings: tuple[str, ...] = ()) -> Settings:
    """Settle every value. ``flags`` go from the strongest to the weakest, ``drawings`` are allowed as output as well.

    Raises `UsageError` that names the wrong value and where it stood.
    """
    given = (*flags, _from_environment(environ))
    levels = (*given, _from_file(_first(given, "config"), environ))
    where = next((level for level in levels if level.socket or level.runtime_dir), Given())
    # A --runtime-dir must not lose to a KVCTL_HOST either; beside a host it says which kvd knows the keys.
    asked = next((level for level in levels if level.host or level.socket or level.runtime_dir), Given())
    color = _settled(levels, "color", one_of(*COLOR_MODES)) or "auto"
    if color == "auto" and environ.get("NO_COLOR"):
        color = "never"
    output = _settled(levels, "output", one_of(*OUTPUT_FORMATS, *drawings)) or "table"
    timeout = _settled(levels, "timeout", seconds)
    return Settings(
        output=cast("OutputFormat", output),
        color=cast("ColorMode", color),
        timeout=timeout or DEFAULT_TIMEOUT,
        timeout_given=timeout is not None,
        # One level decides where the daemon is: a --runtime-dir must not lose to a KVCTL_SOCKET.
        runtime_dir=None if where.socket else where.runtime_dir,
        socket=where.socket,
        host=asked.host,
        context=_settled(levels, "context", str),
        context_typed=any(level.context for level in levels if level.origin == Given.origin),
    )


def _variable(key: str) -> str:
    return f"KVCTL_{key.upper()}"


def _from_environment(environ: Mapping[str, str]) -> Given:
    values = {key: environ.get(_variable(key)) or None for key in (*KEYS, "config")}
    return Given(**values, origin="environment")


def _from_file(named: tuple[Given, str] | None, environ: Mapping[str, str]) -> Given:
    """The config file's values; a file that nobody named may be absent, or lie in somebody else's home."""
    if named:
        path = Path(named[1]).expanduser()
    else:
        home = environ.get("XDG_CONFIG_HOME") or str(Path("~/.config").expanduser())
        path = Path(home, "kvctl", "config.yaml")
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if named:
            raise UsageError(f"{named[0].name_of('config')}: no such file: {path}") from None
        return Given()
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, PermissionError) and not named:
            return Given()
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"cannot read the config file {path}: {reason}") from None
    return Given(**_parse_file(text, path), origin=str(path))


def _parse_file(text: str, path: Path) -> dict[str, str]:
    import yaml

    try:
        document: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UsageError(f"{path} holds a {type(document).__name__}, not keys and values")
    for key, value in document.items():
        if key not in KEYS:
            told = OF_KVD if key in KVDS else near_misses(str(key), KEYS)
            raise UsageError(f"{path}: unknown key {key!r}; {told}")
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise UsageError(f"{path}: {key} is {value!r}, not a text or a number")
    return {str(key): str(value) for key, value in document.items()}


def _first(levels: Iterable[Given], key: str) -> tuple[Given, str] | None:
    for level in levels:
        value: str | None = getattr(level, key)
        if value is not None:
            return level, value
    return None


def _settled(levels: Iterable[Given], key: str, parser: Callable[[str], T]) -> T | None:
    found = _first(levels, key)
    if found is None:
        return None
    level, value = found
    try:
        return parser(value)
    except ValueError as error:
        raise UsageError(f"{level.name_of(key)}: {error}") from None
