"""Settings of stock connectors in ``kv_connector_extra_config``: what becomes of each here.

Someone who switches keeps their configuration. What means the same as a setting of ours is taken for it, the rest is
named as without effect; nothing of it stops an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Stock = Literal["NixlConnector", "MooncakeConnector"]


@dataclass(frozen=True, slots=True)
class StockSetting:
    """An entry that a stock connector reads.

    ``ours`` is the entry that it is taken for, ``option`` the option of the Mooncake backend. ``instead`` says why an
    entry that is not taken has no effect, or what does that here.
    """

    connector: Stock
    ours: str = ""
    option: str = ""
    instead: str = ""


STOCK_SETTINGS: dict[str, StockSetting] = {
    "kv_lease_duration": StockSetting("NixlConnector", ours="lease_seconds"),
    "push_registration_timeout": StockSetting("NixlConnector", ours="push_timeout"),
    "enable_cross_layers_blocks": StockSetting("NixlConnector", ours="outermost"),
    "backends": StockSetting(
        "NixlConnector",
        instead="NIXL moves KV by UCX alone here; the log says what becomes of each other name",
    ),
    "num_threads": StockSetting(
        "NixlConnector",
        instead="UCX gets no threads of its own here; copy_threads of backend_options sets ours",
    ),
    "enforce_handshake_compat": StockSetting(
        "NixlConnector", instead="engines that do not fit are always refused, factor by factor"
    ),
    "engine_ttl": StockSetting("NixlConnector", instead="a peer is forgotten when kvd says that it is gone"),
    "bidirectional_kv_xfer": StockSetting(
        "NixlConnector",
        instead='"prefixes": "on" has a prefiller read what decoders have of earlier turns',
    ),
    "kv_recompute_threshold": StockSetting(
        "NixlConnector", instead="prefix_least bounds what an engine reads of others' prefixes"
    ),
    "decoder_kv_blocks_ttl": StockSetting(
        "NixlConnector", instead="a decoder keeps nothing for prefillers, with prefixes neither"
    ),
    "mooncake_protocol": StockSetting(
        "MooncakeConnector", option="protocol", instead='it is of "backend": "mooncake", and this is another'
    ),
    "device_name": StockSetting(
        "MooncakeConnector",
        option="device_name",
        instead='it is of "backend": "mooncake", and this is another',
    ),
    "num_workers": StockSetting("MooncakeConnector", instead="each peer engine has a thread here"),
    "bootstrap_server_address": StockSetting("MooncakeConnector", instead="kvd introduces engines"),
}
"""All that NixlConnector and MooncakeConnector of vLLM 0.26 to 0.32 read."""


_BESIDE_UCX = (
    "what ends its late writes is not known, so KV goes by UCX: see which of its transports reach the other host"
    " (`ucx_info -d`), and SLOW_PATH in kvctl doctor"
)
_STORED = "it moves to files or objects, and nothing between engines"
NIXL_BACKENDS: dict[str, str] = {
    "UCX": "",
    "LIBFABRIC": _BESIDE_UCX,
    "UCCL": _BESIDE_UCX,
    "GPUNETIO": _BESIDE_UCX,
    "Mooncake": '"backend": "mooncake" goes by Mooncake itself',
    "AZURE_BLOB": _STORED,
    "GDS": _STORED,
    "GDS_MT": _STORED,
    "GUSLI": _STORED,
    "HF3FS": _STORED,
    "INFINIA": _STORED,
    "OBJ": _STORED,
    "POSIX": _STORED,
}
"""Plugins of NIXL that ``backends`` may name, and why each has no effect here; empty for the one that moves KV."""


def nixl_backends(value: Any) -> str:
    """What becomes of the plugins that stock's ``backends`` names, in a few words; empty where UCX alone is named."""
    named = [str(name) for name in value] if isinstance(value, list | tuple) else [str(value)]
    parts = [f"{name}: {why}" for name in named if (why := NIXL_BACKENDS.get(name, _UNKNOWN))]
    return "backends (" + ", ".join(parts) + ")" if parts else ""


_UNKNOWN = f"no plugin of NIXL that is known here; known are {', '.join(NIXL_BACKENDS)}"


@dataclass(slots=True)
class Translated:
    """An extra config in entries of ours.

    ``given`` has the name that was written, by our entry; ``taken`` and ``idle`` say what became of stock's entries;
    ``wrong`` what cannot stand together.
    """

    extra: dict[str, Any]
    given: dict[str, str] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def says(self) -> str:
        """One line about all of stock's settings; empty where there are none."""
        parts = [", ".join(self.taken)] if self.taken else []
        parts += ["without effect: " + "; ".join(self.idle)] if self.idle else []
        return "settings of stock connectors: " + "; ".join(parts) if parts else ""


def translate(extra: Mapping[str, Any]) -> Translated:
    """Take what stock connectors read for our entries, where one means the same."""
    done = Translated({name: value for name, value in extra.items() if name not in STOCK_SETTINGS})
    for name, value in extra.items():
        setting = STOCK_SETTINGS.get(name)
        if setting is None:
            continue
        if setting.ours:
            _take(done, name, setting.ours, _outermost(value) if setting.ours == "outermost" else value)
        elif name == "backends":
            if said := nixl_backends(value):
                done.idle.append(said)
            else:
                done.taken.append("backends is UCX, which moves KV here too")
        elif setting.option and extra.get("backend") == "mooncake":
            _take_option(done, name, setting.option, value)
        else:
            done.idle.append(f"{name} ({setting.instead})")
    return done


def _take(done: Translated, name: str, ours: str, value: Any) -> None:
    if ours in done.extra:
        done.wrong.append(f"{name} and {ours} mean the same; leave one of them out")
        return
    done.extra[ours] = value
    done.given[ours] = name
    done.taken.append(f"{name} is taken for {ours}")


def _take_option(done: Translated, name: str, option: str, value: Any) -> None:
    options = done.extra.get("backend_options", {})
    if not isinstance(options, dict):
        return  # which is an error by itself
    if option in options:
        done.wrong.append(f"{name} and {option} of backend_options mean the same; leave one of them out")
        return
    done.extra["backend_options"] = {**options, option: value}
    done.taken.append(f"{name} is taken for {option} of backend_options")


def _outermost(joined: Any) -> str:
    """Stock takes words for truth values here, and what is none for false."""
    return "block" if str(joined).lower() == "true" else "layer"
