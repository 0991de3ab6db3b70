"""The daemon's settings: YAML and ``KVD_*`` variables into one frozen struct, with errors that name the culprit."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import msgspec
import yaml

from kvd.addresses import split_address
from kvd.service.errors import ConfigError
from kvd.wire.limits import MOST_FOR_DAEMON
from kvd.wire.names import RUNTIME_DIR_VARIABLE, runtime_dir

log = logging.getLogger(__name__)

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(gt=0)]
LogLevel = Literal["debug", "info", "warning", "error"]
PREFIX = "KVD_"


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all sections have in common: an unknown key is an error, not a setting that silently does nothing."""


class LocalSettings(_Section, frozen=True):
    """The socket for workers and operators."""

    max_message_bytes: Count = MOST_FOR_DAEMON
    queue: Count = 4096


class CurveSettings(_Section, frozen=True):
    """Keys of the peer socket. Without ``authorized_keys`` the peers are those that hold the same key file."""

    key_file: str = ""
    authorized_keys: str = ""


class PeerSettings(_Section, frozen=True):
    """The socket for other kvds. ``listen`` empty: none. ``connect``: kvds to fetch engines from ahead of need."""

    listen: str = ""
    advertise: str = ""
    connect: tuple[str, ...] = ()
    max_message_bytes: Count = MOST_FOR_DAEMON
    queue: Count = 1024
    handshake_seconds: Seconds = 5.0
    ping_seconds: Seconds = 1.0
    down_seconds: Seconds = 3.0
    curve: CurveSettings = CurveSettings()


class LivenessSettings(_Section, frozen=True):
    """When a local client counts as silent or gone. Seconds."""

    heartbeat_seconds: Seconds = 0.25
    silent_seconds: Seconds = 1.0
    gone_seconds: Seconds = 10.0
    settle_seconds: Seconds = 5.0
    remember_seconds: Seconds = 600.0


class LeaseSettings(_Section, frozen=True):
    """``margin_seconds`` is held back from every answer, ``confirm_seconds`` is what an owner may take to answer.

    ``peer_seconds`` is the most that another host gets by one claim: decoders ask for their ``lease_seconds``, 30 by
    default, and claim again while they wait.
    """

    margin_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.1
    confirm_seconds: Seconds = 2.0
    peer_seconds: Seconds = 120.0
    max_seconds: Seconds = 3600.0


class LedgerSettings(_Section, frozen=True):
    """Bounds of the durable record of transfers. What is oldest goes first; freed space is used again."""

    max_rows: Count = 1_000_000
    max_bytes: Count = 4 << 30
    max_age_seconds: Seconds = 14 * 86400.0


class OrderSettings(_Section, frozen=True):
    """Who may give orders to engines besides root, kvd's own user and the engine's: members of ``group``."""

    group: str = ""


class AccessSettings(_Section, frozen=True):
    """What those who may use the sockets see of other users' engines: ``all``, or of their ``own`` alone.

    Root, kvd's own user and members of ``orders.group`` see all. So do operators on ``hosts``: places or keys in the
    list of trusted keys, or ``*`` for all of them.
    """

    read: Literal["all", "own"] = "all"
    hosts: tuple[str, ...] = ()


class MetricsSettings(_Section, frozen=True):
    """HTTP for /metrics, /healthz and /readyz. ``listen`` empty: none."""

    listen: str = ""


class TracingSettings(_Section, frozen=True):
    """Spans of transfers, to an OpenTelemetry collector by OTLP over HTTP. ``endpoint`` empty: none.

    ``sample`` is the part of the traces, of those that their callers sample. So many transfers may wait in ``queue``.
    """

    endpoint: str = ""
    sample: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    queue: Count = 2048
    timeout_seconds: Seconds = 10.0


class DnsSettings(_Section, frozen=True):
    """The name, as ``host:port``, whose addresses are all kvds, and how often it is looked up."""

    name: str = ""
    every_seconds: Seconds = 5.0


class EtcdSettings(_Section, frozen=True):
    """Servers of etcd by their URLs, and where in it the hosts of this fleet stand. ``host`` empty: this kvd's id."""

    endpoints: tuple[str, ...] = ()
    cluster: str = "default"
    host: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    user: str = ""
    password_file: str = ""


class MembershipSettings(_Section, frozen=True):
    """From where kvd learns which other kvds there are, besides ``peer.connect``. A source lets no key in."""

    source: Literal["static", "dns", "etcd"] = "static"
    dns: DnsSettings = DnsSettings()
    etcd: EtcdSettings = EtcdSettings()


class Config(_Section, frozen=True):
    """All settings. Times are in seconds, sizes in bytes, addresses are ``host:port``."""

    runtime_dir: str = ""
    state_dir: str = ""
    log_level: LogLevel = "info"
    drain_seconds: Seconds = 5.0
    local: LocalSettings = LocalSettings()
    peer: PeerSettings = PeerSettings()
    membership: MembershipSettings = MembershipSettings()
    liveness: LivenessSettings = LivenessSettings()
    leases: LeaseSettings = LeaseSettings()
    ledger: LedgerSettings = LedgerSettings()
    orders: OrderSettings = OrderSettings()
    access: AccessSettings = AccessSettings()
    metrics: MetricsSettings = MetricsSettings()
    tracing: TracingSettings = TracingSettings()

    @property
    def directory(self) -> Path:
        """The runtime directory in force."""
        return runtime_dir(self.runtime_dir or None)

    @property
    def state_directory(self) -> Path:
        """Where the ledger stands: as set, else systemd's ``$STATE_DIRECTORY``, else below the runtime directory."""
        if given := self.state_dir or os.environ.get("STATE_DIRECTORY", "").split(":")[0]:
            return Path(given)
        return self.directory / "state"


RELOADABLE = frozenset({"log_level", "drain_seconds", "liveness", "leases", "ledger", "orders"})
"""Top-level settings that SIGHUP puts in force; the others need a restart."""
_ASCENDING = (
    ("liveness.heartbeat_seconds", "liveness.silent_seconds"),
    ("liveness.silent_seconds", "liveness.gone_seconds"),
    ("peer.ping_seconds", "peer.down_seconds"),
)
"""Settings of which the second must be larger than the first."""


def load(
    path: str | Path | None, environment: Mapping[str, str], overrides: Mapping[str, str] | None = None
) -> Config:
    """The settings of a file (None: the defaults), then ``KVD_SECTION_KEY`` variables, then ``overrides``.

    ``overrides`` are by dotted key. Raises `ConfigError` naming the file and line or the variable, the key, and
    the value found.
    """
    text, origin = "", "the defaults"
    if path is not None:
        origin = str(path)
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(f"cannot read {path}: {why}", hint="give another file with --config") from None
    tree = _parse(text, origin)
    sources = _Sources(origin, yaml.compose(text, yaml.SafeLoader))
    for variable, key in _variables().items():
        if variable in environment:
            _put(tree, key, environment[variable])
            sources.given[key] = f"${variable}"
    for key, value in (overrides or {}).items():
        _put(tree, key, value)
        sources.given[key] = "the command line"
    _warn_of_variables(environment)
    _reject_unknown(tree, Config, (), sources)
    try:
        config = msgspec.convert(tree, Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(
            _explain(str(error), tree, sources), hint="configs/kvd.yaml explains each key"
        ) from None
    _check(config, sources)
    return _bounded(config, sources)


@dataclass(frozen=True, slots=True)
class _Sources:
    """Where settings stand: in a file, by YAML's own marks, or in what is ``given`` in its place, by dotted key."""

    origin: str
    file: yaml.Node | None
    given: dict[str, str] = field(default_factory=dict)

    def place(self, key: str) -> str:
        """The variable, or the file and the line; the file alone for what it does not hold."""
        if key in self.given:
            return self.given[key]
        node, place = self.file, self.origin
        for name in key.split("."):
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            found = [(at, value) for at, value in pairs if at.value == name]
            if not found:
                return self.origin
            at, node = found[-1]
            place = f"{self.origin}, line {at.start_mark.line + 1}"
        return place


def endpoint(text: str, key: str) -> tuple[str, int]:
    """``host:port`` (``[v6]:port``) as a pair. Raises `ConfigError` naming ``key`` and the value."""
    try:
        return split_address(text)
    except ValueError as error:
        raise ConfigError(
            f"{key}: {error}", hint="write for example 127.0.0.1:9401; port 0 takes any"
        ) from None


def _parse(text: str, origin: str) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{origin}{where}: not YAML: {getattr(error, 'problem', None) or error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{origin}: found a {type(tree).__name__} where settings (key: value) are wanted")
    return tree


def _settings(struct: type[msgspec.Struct], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, kind in get_type_hints(struct).items():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from _settings(kind, (*prefix, name))
        else:
            yield (*prefix, name)


def _variables() -> dict[str, str]:
    """The dotted key of each environment variable; the runtime directory's is also the clients'."""
    known = {PREFIX + "_".join(key).upper(): ".".join(key) for key in _settings(Config)}
    del known[RUNTIME_DIR_VARIABLE]
    return known


def _warn_of_variables(environment: Mapping[str, str]) -> None:
    """Name variables that look like a setting's and are none. They are no error: other programs have theirs."""
    known = _variables()
    sections = {"_".join((*variable.split("_")[:2], "")) for variable, key in known.items() if "." in key}
    for name in environment:
        if name not in known and any(name.startswith(section) for section in sections):
            close = get_close_matches(name, known, n=1)
            meant = f": did you mean {close[0]}?" if close else ""
            log.warning("$%s sets nothing, no setting of kvd is called so%s", name, meant)


def _put(tree: dict[str, Any], key: str, value: str) -> None:
    *path, last = key.split(".")
    for part in path:
        below = tree.setdefault(part, {})
        if not isinstance(below, dict):
            return  # left as it is: the check of the whole will name it
        tree = below
    kind: Any = Config
    for part in (*path, last):
        kind = get_type_hints(kind)[part]
    tree[last] = [part for part in value.split(",") if part] if get_origin(kind) is tuple else value


def _reject_unknown(
    tree: dict[Any, Any], struct: type[msgspec.Struct], path: tuple[str, ...], sources: _Sources
) -> None:
    hints = get_type_hints(struct)
    for key, value in tree.items():
        dotted = ".".join((*path, str(key)))
        if key not in hints:
            raise ConfigError(
                f"{sources.place(dotted)}: no setting is called {dotted!r}",
                hint=f"known here: {', '.join(sorted(hints))}",
            )
        kind = hints[key]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{sources.place(dotted)}: {dotted} is {value!r}, wanted is a section of keys",
                    hint=f"known there: {', '.join(sorted(get_type_hints(kind)))}",
                )
            _reject_unknown(value, kind, (*path, str(key)), sources)


def _explain(error: str, tree: dict[str, Any], sources: _Sources) -> str:
    match = re.search(r" - at `\$\.?([^`]*)`", error)
    if not match:
        return f"{sources.origin}: {error}"
    key = match[1].replace("[...]", "")
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else value
    return f"{sources.place(key)}: {key} is {value!r}: {error[: match.start()]}"


def _check(config: Config, sources: _Sources) -> None:
    for key in ("peer.listen", "metrics.listen", "peer.advertise"):
        if value := attrgetter(key)(config):
            endpoint(value, key)
    for value in config.peer.connect:
        endpoint(value, "peer.connect")
    for low, high in _ASCENDING:
        below, above = attrgetter(low)(config), attrgetter(high)(config)
        if below >= above:
            places = {place for key in (low, high) if (place := sources.place(key)) != sources.origin}
            raise ConfigError(
                f"{' and '.join(sorted(places)) or sources.origin}: {low} is {below:g}, {high} is {above:g}:"
                " it must be the larger"
            )


def _bounded(config: Config, sources: _Sources) -> Config:
    """The settings with sizes that count: kvd takes no larger message on any socket, whatever is set."""
    found = {"local": config.local.max_message_bytes, "peer": config.peer.max_message_bytes}
    for name, size in found.items():
        if size > MOST_FOR_DAEMON:
            key = f"{name}.max_message_bytes"
            log.warning(
                "%s: %s is %d, of which %d count: kvd takes no larger message", sources.place(key), key, size,
                MOST_FOR_DAEMON,
            )  # fmt: skip
    local = msgspec.structs.replace(config.local, max_message_bytes=min(found["local"], MOST_FOR_DAEMON))
    peer = msgspec.structs.replace(config.peer, max_message_bytes=min(found["peer"], MOST_FOR_DAEMON))
    return msgspec.structs.replace(config, local=local, peer=peer)
