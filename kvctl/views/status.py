"""The Status document: what `kvctl status` prints."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvctl.views.engines import endpoint_name
from kvctl.views.fields import Count, Seconds, Time
from kvctl.views.registry import moment
from kvd.wire import query


class Peer(Struct, frozen=True, kw_only=True):
    """Another kvd as the asked one sees it."""

    endpoint: Annotated[str | None, Meta(description="host:port")]
    kvd_id: str
    state: Annotated[str, Meta(description="connecting, up or down")]
    rtt: Annotated[Seconds, Meta(description="round trip of the last ping, in seconds")]
    since: Annotated[Time, Meta(description="last change of state")]


class Status(Struct, frozen=True, kw_only=True):
    """One kvd at one moment."""

    kvd_id: str
    generation: Annotated[str, Meta(description="new at each start of kvd")]
    version: str
    pid: int
    host: str
    started: Time
    runtime_dir: str
    endpoint: Annotated[str | None, Meta(description="host:port of its peer socket; null when it has none")]
    draining: bool
    peers: tuple[Peer, ...]
    counters: Annotated[dict[str, Count], Meta(description="they only grow while this kvd lives")]
    gauges: Annotated[dict[str, float], Meta(description="values of now")]


def status_document(status: query.Status) -> Status:
    """The document of kvd's answer."""
    return Status(
        kvd_id=status.kvd_id,
        generation=status.generation,
        version=status.version,
        pid=status.pid,
        host=status.host,
        started=moment(status.started),
        runtime_dir=status.runtime_dir,
        endpoint=endpoint_name(status.endpoint),
        draining=status.draining,
        peers=tuple(
            Peer(
                endpoint=endpoint_name(peer.endpoint),
                kvd_id=peer.kvd_id,
                state=peer.state,
                rtt=max(0.0, peer.rtt),
                since=moment(peer.since),
            )
            for peer in status.peers
        ),
        counters=status.counters,
        gauges=status.gauges,
    )
