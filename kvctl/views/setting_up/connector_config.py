"""The ConnectorConfig document: what `kvctl connector-config` prints."""

from __future__ import annotations

import json
import shlex
from typing import Annotated, Any

from msgspec import Meta, Struct

from kvctl.views.registry import View
from kvctl.views.screen import ScreenPart


class ConnectorConfig(Struct, frozen=True, kw_only=True):
    """The flag that has an engine of vLLM exchange KV."""

    role: Annotated[str, Meta(description="prefill, decode or both")]
    flag: Annotated[str, Meta(description="of vllm serve; config is its value")]
    config: dict[str, Any]


def connector_config_screen(body: ConnectorConfig, _wide: bool) -> ScreenPart:
    """One word for a shell, the flag with its value in quotes: without a blank no terminal breaks it in two."""
    value = json.dumps(body.config, separators=(",", ":")).replace(" ", "\\u0020")
    return f"{body.flag}={shlex.quote(value)}"


VIEWS = (View(ConnectorConfig, connector_config_screen),)
