"""The connector's settings.

``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``, read strictly.
"""

from __future__ import annotations

import difflib
import re
import zlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from kvd.addresses import split_address
from kvd.topology.pieces import LEAST_BYTES
from kvd.wire.identity import HERE, Endpoint
from kvd.worker.errors import BadSettings
from kvd.worker.stock import STOCK_SETTINGS, translate

ONE_HOST, THIS_HOST = "auto", "here"
"""Values of `ConnectorSettings.home`: all of the engine is on one host, or its scheduler is on this one."""
_DAY = 86400.0
_LONGEST_ID = 128


def _says(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


def _number(text: str, least: float, most: float = _DAY, unit: str = "seconds") -> msgspec.Meta:
    return msgspec.Meta(description=text, ge=least, le=most, extra={"unit": unit})


class ConnectorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How this engine transfers KV. Times are in seconds. docs/connector.md is made from what stands here."""

    runtime_dir: Annotated[
        str | None,
        _says("Directory of kvd's sockets; as kvd's own default: `$KVD_RUNTIME_DIR`, else `/run/kvd`."),
    ] = None
    backend: Annotated[
        str,
        _says(
            "What moves the bytes, the same on both engines: `nixl` or `mooncake`. `direct` works between workers on"
            " one host. `auto` is direct where it can be, and else a transfer engine. `staged` is a transfer engine by"
            " way of host memory. `memory` works within one process, for tests."
        ),
    ] = "nixl"
    backend_options: Annotated[dict[str, Any], _says("Passed on to the backend; see docs/backends/.")] = {}
    mode: Annotated[
        Literal["pull", "push"],
        _says(
            "`pull`: the decoder reads once the prefill is done. `push`: the prefiller sends each layer as it is"
            " computed, where the router says so; see docs/routers.md."
        ),
    ] = "pull"
    weights: Annotated[
        str,
        _says(
            "Which weights this engine runs; engines of other weights are refused. `auto`: their fingerprint, taken at"
            " start. `off`: not compared, model names decide. Anything else is taken for the name of these weights:"
            " engines with one name fit, whatever their files hold."
        ),
    ] = "auto"
    outermost: Annotated[
        Literal["auto", "block", "layer"],
        _says(
            "What comes first in KV memory. `block`: all layers of a block stand together, so scattered blocks are few"
            " copies; `layer`: each layer by itself, as layer-wise pushes want it. `auto`: `block` for pulls on vLLM"
            " 0.26 to 0.28, else `layer`. vLLM keeps layers apart where its attention cannot read them otherwise."
        ),
    ] = "auto"
    in_step: Annotated[
        Literal["auto", "off"],
        _says(
            "Decoder: `auto`: where the device can wait for a short load by itself, the load is used in the step that"
            " orders it. `off`: all loads come between steps. See [below](#loads-inside-a-step)."
        ),
    ] = "auto"
    lease_seconds: Annotated[
        float, _number("Prefiller: how long a finished request's blocks are kept for a decoder.", 0.1)
    ] = 30.0
    load_timeout: Annotated[
        float, _number("Decoder: a load that is not complete after this is a miss.", 0.01)
    ] = 20.0
    handshake_timeout: Annotated[
        float, _number("Decoder: how long a request waits for its prefiller to become known.", 0.01)
    ] = 10.0
    push_timeout: Annotated[
        float,
        _number(
            "Decoder: a pushed request that is not complete this long after its blocks were announced is a miss.",
            0.01,
        ),
    ] = 120.0
    piece_bytes: Annotated[
        int,
        _number(
            "Decoder: a pull is read in pieces, one for every so many bytes on each worker, at most eight; after a miss"
            " those that came are kept, where the model allows it.",
            1,
            1 << 40,
            "bytes",
        ),
    ] = LEAST_BYTES
    prefixes: Annotated[
        Literal["off", "on"],
        _says(
            "`on`: this engine reads prefixes out of other engines' caches, and they out of its own; see"
            " docs/prefixes.md. vLLM 0.32 and later."
        ),
    ] = "off"
    prefix_least: Annotated[
        int,
        _number(
            "With prefixes: how many more tokens than are cached here another engine must hold to be read from.",
            1,
            1 << 20,
            "tokens",
        ),
    ] = 256
    prefix_wait: Annotated[
        float, _number("With prefixes: how long a request waits to hear who holds its prefix.", 0.001, 10.0)
    ] = 0.1
    prefix_cost: Annotated[
        float,
        _number(
            "With prefixes: the share of its time, 0 to 1, that peers' reads of its cache may cost this engine; 0.005"
            " is half a per cent. Over that it turns questions for prefixes down while it has requests. It counts where"
            " a thread of the engine moves the bytes (TCP) and takes a processor from it; decoders' pulls count too.",
            0.0,
            1.0,
            "of its time",
        ),
    ] = 0.005
    home: Annotated[
        str,
        _says(
            "Of an engine with workers on several hosts: the kvd on its scheduler's host, as `HOST` or `HOST:PORT`, the"
            " same on all of them; without a port, that of the local kvd. `auto`: vLLM's `--master-addr`, if `--nnodes`"
            " says that there are several; else all are on one host."
        ),
    ] = "auto"
    probe: Annotated[
        bool,
        _says(
            "Decoder: read a peer's null block when it becomes known, so that the first load finds a connection, and"
            " between GPUs warn of a slow path."
        ),
    ] = True
    kv_checksum: Annotated[
        Literal["off", "all"] | Annotated[int, _number("", 1, 1 << 31, "requests")],
        _says(
            "Prefiller: whose KV is added up, and by the decoder again after the load; what differs is a miss. `off`,"
            " `all`, or a number: one request in so many. docs/transfers.md says what it catches and what it costs."
        ),
    ] = "off"
    lease_margin: Annotated[
        float,
        _number("Decoder: taken off every lease, for messages on their way; below `lease_seconds`.", 0.0),
    ] = 0.5
    clock_skew: Annotated[
        float, _number("Has no effect any more: a lease is never taken by another host's clock.", 0.0)
    ] = 2.0
    lease_grace: Annotated[
        float,
        _number(
            "Prefiller: how long beyond a lease kvd's word is awaited before blocks are freed without it.",
            0.0,
        ),
    ] = 5.0

    def samples(self, name: str) -> bool:
        """Whether the KV of a request (or transfer) is added up: the same answer on every worker and every time."""
        if isinstance(self.kv_checksum, int):
            return zlib.crc32(name.encode()) % self.kv_checksum == 0
        return self.kv_checksum == "all"


def home_kvd(home: str) -> Endpoint | None:
    """The kvd that the setting ``home`` names: None where all of the engine is at the local one, or for what is bad."""
    if home == THIS_HOST:
        return HERE
    if home == ONE_HOST:
        return None
    try:
        return Endpoint(*split_address(home))
    except ValueError:
        bare = bool(home) and not re.search(r"[\s\[\]/]", home) and (":" not in home or home.count(":") > 1)
        return Endpoint(home, 0) if bare and len(home) <= _LONGEST_ID else None


def read_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """The settings in an extra config, those of stock connectors translated (`kvd.worker.stock`).

    Raises `BadSettings` naming every bad entry and what it may be.
    """
    hints = get_type_hints(ConnectorSettings, include_extras=True)
    translated = translate(extra)
    wrong = list(translated.wrong)
    for name, value in translated.extra.items():
        if name not in hints:
            wrong.append(_unknown(name, hints))
            continue
        given = translated.given.get(name, name)
        try:
            msgspec.convert(value, hints[name])
        except msgspec.ValidationError:
            wrong.append(f"{given} is {extra[given]!r}; it must be {_name(hints[name])}")
            continue
        if name == "home" and home_kvd(value) is None and value != ONE_HOST:
            wrong.append(f'home is {value!r}; it must be "auto", HOST or HOST:PORT')
        if name == "weights" and not (
            value.isprintable() and 0 < len(value.strip()) == len(value) <= _LONGEST_ID
        ):
            wrong.append(
                f'weights is {value!r}; it must be "auto", "off" or a name of 1 to {_LONGEST_ID} printable characters'
            )
    if not wrong:
        settings = msgspec.convert(translated.extra, ConnectorSettings)
        if settings.lease_margin < settings.lease_seconds:
            return settings
        wrong.append(
            f"lease_margin is {settings.lease_margin:g} and lease_seconds {settings.lease_seconds:g}; the margin must"
            " be smaller, or nothing is left of any lease"
        )
    raise BadSettings("kv_connector_extra_config: " + "; ".join(wrong))


def _unknown(name: str, hints: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, [*hints, *STOCK_SETTINGS], n=1, cutoff=0.7)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"{name} is no setting; {meant}there are {', '.join(hints)}"


def _name(kind: Any) -> str:
    """A type for people: ``a number from 0 to 5 seconds``, ``one of "pull"``."""
    if get_origin(kind) is Annotated:
        bare, meta = get_args(kind)
        bounds = "" if meta.ge is None else f" from {meta.ge:g} to {meta.le:g} {meta.extra['unit']}"
        return _name(bare) + bounds
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(kind))
    if get_origin(kind) is dict:
        return "an object"
    return _WORDS.get(kind) or " or ".join(_name(part) for part in get_args(kind))


_WORDS: dict[Any, str] = {
    str: "a string",
    bool: "true or false",
    float: "a number",
    int: "a whole number",
    type(None): "null",
}
