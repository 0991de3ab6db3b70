"""The FleetLeases document: what `kvctl leases --fleet` prints."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvctl.cli.units import filled
from kvctl.views.fleet.differing import differing
from kvctl.views.fleet.unanswered import HOST, FleetOf, unanswered_screen
from kvctl.views.registry import View
from kvctl.views.running.leases import LeaseDocument, lease_columns, lease_names
from kvctl.views.screen import ScreenPart


class FleetLease(LeaseDocument, frozen=True, kw_only=True):
    """A lease as one of its two sides has it."""

    host: Annotated[str, Meta(description="host:port of the kvd that knows it")]


class FleetLeases(FleetOf, frozen=True, kw_only=True):
    """The leases that all known hosts gave or claimed; one between two hosts is there from both."""

    leases: tuple[FleetLease, ...]


def fleet_lease(host: str, lease: LeaseDocument) -> FleetLease:
    """A lease with the host whose kvd told of it."""
    return filled(FleetLease, lease, host=host)


def fleet_leases_screen(body: FleetLeases, wide: bool) -> ScreenPart:
    """One side of a lease a line, with the columns in which they differ, all of them when wide."""
    owner, request, *others = lease_columns(wide)
    return [
        differing(body.leases, owner, request, HOST, *others, whole=wide),
        *unanswered_screen(body.unanswered),
    ]


VIEWS = (
    View(
        FleetLeases,
        fleet_leases_screen,
        "leases",
        FleetLease,
        {"name": lambda body: lease_names(body.leases)},
    ),
)
