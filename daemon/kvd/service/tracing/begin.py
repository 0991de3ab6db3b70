"""Starts what brings spans to the collector, where the settings name one."""

from __future__ import annotations

from collections.abc import Callable

from kvd.installed import own_version
from kvd.service.tracing.tracing import Tracing


def begin(tracing: Tracing, kvd_id: str, host: str) -> Callable[[], None]:
    """Have what waits there told to the collector from now on; what ends that."""
    from kvd.service.tracing.exporter import SpanThread  # it needs OpenTelemetry, which is an extra

    resource = {
        "service.name": "kvd",
        "service.version": own_version(),
        "service.instance.id": kvd_id,
        "host.name": host,
    }
    return SpanThread(tracing, resource).close
