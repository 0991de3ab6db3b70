"""The FleetStatus document: what `kvctl status --fleet` prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from msgspec import Meta, Struct

from kvctl.cli.numbers import age
from kvctl.cli.units import Count, Time
from kvctl.views.fleet.differing import differing
from kvctl.views.fleet.unanswered import FleetOf, unanswered_screen
from kvctl.views.registry import View, moment, named
from kvctl.views.screen import Column, ScreenPart, Styled, number
from kvd.wire.query import KvdStatus


class FleetHost(Struct, frozen=True, kw_only=True):
    """One kvd at one moment, in a line."""

    host: Annotated[str, Meta(description="host:port at which it was asked")]
    kvd_id: str
    version: str
    state: Annotated[str, Meta(description="serving or draining")]
    started: Time
    engines: Annotated[Count, Meta(description="engines of that host that are ready")]
    engines_not_ready: Annotated[Count, Meta(description="those that miss workers, or are gone")]
    workers: Annotated[Count, Meta(description="workers that are alive")]
    peers_up: Count
    peers_not_up: Count
    leases: Annotated[Count, Meta(description="leases open")]
    transfers: Annotated[Count, Meta(description="transfers that are done, since it started")]
    misses: Annotated[Count, Meta(description="transfers that missed, since it started")]
    trouble: Annotated[str, Meta(description="what keeps it from some of its work; empty as a rule")]


class FleetStatus(FleetOf, frozen=True, kw_only=True):
    """The kvds of all known hosts."""

    kvds: tuple[FleetHost, ...]


SORTS: dict[str, Callable[[FleetHost], Any]] = {
    "host": lambda one: one.host,
    "version": lambda one: one.version,
    "state": lambda one: one.state,
    "started": lambda one: one.started,
    "engines": lambda one: -one.engines,
    "not-ready": lambda one: -one.engines_not_ready,
    "peers": lambda one: -one.peers_not_up,
    "leases": lambda one: -one.leases,
    "transfers": lambda one: -one.transfers,
    "misses": lambda one: -one.misses,
}
"""What kvds may be sorted by; most first where they are counts."""


def fleet_host(host: str, status: KvdStatus) -> FleetHost:
    """One line of what a kvd answered."""
    now, counted = status.gauges, status.counters
    troubles = (
        f"ledger away: {status.ledger_away}" if status.ledger_away else "",
        f"engines not introduced: {status.comparing}" if status.comparing else "",
        f"{status.membership.source} away: {status.membership.reason}"
        if status.membership is not None and status.membership.state == "away"
        else "",
        f"list of keys not read: {status.keys.error}"
        if status.keys is not None and status.keys.error
        else "",
    )
    return FleetHost(
        host=host,
        kvd_id=status.kvd_id,
        version=status.version,
        state="draining" if status.draining else "serving",
        started=moment(status.started),
        engines=_sum(now, "engines.ready"),
        engines_not_ready=_sum(now, "engines.partial", "engines.gone"),
        workers=_sum(now, "workers.alive"),
        peers_up=_sum(now, "peers.up"),
        peers_not_up=_sum(now, "peers.connecting", "peers.down", "peers.untrusted"),
        leases=_sum(now, "leases.open"),
        transfers=counted.get("transfers.done", 0),
        misses=counted.get("transfers.miss", 0),
        trouble="; ".join(filter(None, troubles)),
    )


def fleet_status_screen(body: FleetStatus, wide: bool) -> ScreenPart:
    """One kvd a line, with the columns in which they differ, all of them when wide."""
    troubles = wide or any(one.trouble for one in body.kvds)
    return [
        differing(
            body.kvds,
            Column("HOST", lambda one: one.host),
            Column("KVD", lambda one: one.kvd_id, wide),
            Column("VERSION", lambda one: one.version),
            Column("STATE", lambda one: Styled(one.state, "green" if one.state == "serving" else "yellow")),
            number("UP", lambda one: age(one.started)),
            number("ENGINES", lambda one: one.engines),
            number("NOT READY", lambda one: one.engines_not_ready),
            number("WORKERS", lambda one: one.workers),
            number("PEERS", lambda one: f"{one.peers_up}/{one.peers_up + one.peers_not_up}"),
            number("LEASES", lambda one: one.leases),
            number("DONE", lambda one: one.transfers),
            number("MISSES", lambda one: one.misses),
            Column("REASON", lambda one: one.trouble or "-", troubles),
            whole=wide,
        ),
        *unanswered_screen(body.unanswered),
    ]


def _sum(gauges: dict[str, float], *names: str) -> int:
    return int(sum(gauges.get(name, 0.0) for name in names))


VIEWS = (View(FleetStatus, fleet_status_screen, "kvds", FleetHost, named("kvds", lambda one: one.host)),)
