"""The settings for tracing, checked before kvd starts."""

from __future__ import annotations

import importlib.util
from urllib.parse import urlsplit

from kvd.service.config import TracingSettings
from kvd.service.errors import ConfigError

LIBRARY = "opentelemetry.exporter.otlp.proto.http"


def check(settings: TracingSettings) -> None:
    """Raise `ConfigError` for settings of tracing with which kvd does not start."""
    if not settings.endpoint:
        return
    if not _is_there(LIBRARY):
        raise ConfigError(
            "tracing.endpoint is set, which needs OpenTelemetry, and that is not installed",
            hint="type `pip install kvctl[otel]` in the environment that runs kvd",
        )
    parts = urlsplit(settings.endpoint)
    try:
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is none
        usable = False
    if not usable or parts.path in {"", "/"}:
        raise ConfigError(
            f"tracing.endpoint: {settings.endpoint!r} is no URL with a path",
            hint="write for example http://127.0.0.1:4318/v1/traces",
        )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
