"""The connector's settings.

``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``, read strictly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvd.vllm.errors import BadSettings


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
    """The settings in an extra config. Raises `BadSettings` naming the entry and what it may be."""
    try:
        settings = msgspec.convert(dict(extra), Settings)
    except msgspec.ValidationError as error:
        names = ", ".join(Settings.__struct_fields__)
        raise BadSettings(f"kv_connector_extra_config: {error}; known entries are {names}") from None
    for name in ("lease_seconds", "load_timeout", "handshake_timeout"):
        if not 0 < getattr(settings, name) <= 86400:
            raise BadSettings(
                f"kv_connector_extra_config: {name} is {getattr(settings, name)}; it must be in (0, 86400] seconds"
            )
    return settings
