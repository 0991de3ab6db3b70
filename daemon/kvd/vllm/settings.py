"""The connector's settings.

``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``, read strictly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from kvd.vllm.errors import BadSettings

_DAY = 86400.0
_RANGES = {
    "lease_seconds": (0.1, _DAY),
    "load_timeout": (0.01, _DAY),
    "handshake_timeout": (0.01, _DAY),
    "lease_margin": (0.0, _DAY),
    "clock_skew": (0.0, _DAY),
    "lease_grace": (0.0, _DAY),
}
"""Least and most seconds."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How this engine transfers KV. All times are in seconds.

    ``runtime_dir``: kvd's, default as kvd's own (``KVD_RUNTIME_DIR``, /run/kvd). ``backend``: nixl (or
    memory, for tests). ``backend_options`` go to the backend as they are. ``lease_seconds``: how long a
    prefiller keeps a finished request's blocks for a decoder. ``load_timeout``: a load that is not complete
    after this is a miss. ``handshake_timeout``: how long a request waits for a peer to become known before it
    is computed here. ``lease_margin``: what a decoder takes off the lease for messages on their way.
    ``clock_skew``: bound on the difference of two hosts' clocks, used only while kvd is away.
    ``lease_grace``: how long beyond the lease a prefiller waits for kvd's word before it frees by itself.
    """

    runtime_dir: str | None = None
    backend: str = "nixl"
    backend_options: dict[str, Any] = {}
    mode: Literal["pull"] = "pull"
    lease_seconds: float = 30.0
    load_timeout: float = 20.0
    handshake_timeout: float = 10.0
    lease_margin: float = 0.5
    clock_skew: float = 2.0
    lease_grace: float = 5.0


def read_settings(extra: Mapping[str, Any]) -> Settings:
    """The settings in an extra config. Raises `BadSettings` naming every bad entry and what it may be."""
    hints = get_type_hints(Settings)
    wrong = []
    for name, value in extra.items():
        if name not in hints:
            wrong.append(f"{name} is no setting; there are {', '.join(hints)}")
            continue
        try:
            msgspec.convert(value, hints[name])
        except msgspec.ValidationError:
            wrong.append(f"{name} is {value!r}; it must be {_name(hints[name])}")
            continue
        least, most = _RANGES.get(name, (-math.inf, math.inf))
        if isinstance(value, (int, float)) and not least <= value <= most:
            wrong.append(f"{name} is {value:g}; it must be from {least:g} to {most:g} seconds")
    if not wrong:
        settings = msgspec.convert(dict(extra), Settings)
        if settings.lease_margin < settings.lease_seconds:
            return settings
        wrong.append(
            f"lease_margin is {settings.lease_margin:g} and lease_seconds {settings.lease_seconds:g}; the margin must"
            " be smaller, or nothing is left of any lease"
        )
    raise BadSettings("kv_connector_extra_config: " + "; ".join(wrong))


def _name(kind: Any) -> str:
    """A type for people: ``a number or null``, ``one of "pull"``."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(kind))
    if get_origin(kind) is dict:
        return "an object"
    words = {str: "a string", float: "a number", type(None): "null"}
    return " or ".join(words[part] for part in (get_args(kind) or (kind,)))
