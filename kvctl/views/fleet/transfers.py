"""The FleetTransfers document: what `kvctl transfers --fleet` prints."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvctl.cli.units import Count, filled
from kvctl.views.fleet.unanswered import HOST, FleetOf, unanswered_screen
from kvctl.views.folded.rows import listing
from kvctl.views.registry import View, named
from kvctl.views.screen import ScreenPart
from kvctl.views.transfers.document import TransferDocument, transfer_columns
from kvctl.views.transfers.groups import TransferGroups, transfer_groups_screen


class FleetTransfer(TransferDocument, frozen=True, kw_only=True):
    """One row of a ledger; ``seq`` counts in that ledger alone."""

    host: Annotated[str, Meta(description="host:port of the kvd whose ledger has it")]


class FleetTransfers(FleetOf, frozen=True, kw_only=True):
    """The transfers that match, of the ledgers of all known hosts; each is in the ledger of who loaded."""

    total: Annotated[Count, Meta(description="transfers in the ledgers, matching or not")]
    transfers: tuple[FleetTransfer, ...]


class FleetGroups(FleetOf, frozen=True, kw_only=True):
    """The same counted together, whatever host they are of."""

    groups: TransferGroups


def fleet_transfer(host: str, transfer: TransferDocument) -> FleetTransfer:
    """A transfer with its host."""
    return filled(FleetTransfer, transfer, host=host)


def fleet_transfers_screen(body: FleetTransfers, wide: bool) -> ScreenPart:
    """One transfer a line."""
    started, *others = transfer_columns(body.transfers, wide)
    return [
        listing(body.transfers, started, HOST, *others),
        *unanswered_screen(body.unanswered),
    ]


def fleet_groups_screen(body: FleetGroups, wide: bool) -> ScreenPart:
    """One group a line."""
    return [transfer_groups_screen(body.groups, wide), *unanswered_screen(body.unanswered)]


VIEWS = (
    View(
        FleetTransfers,
        fleet_transfers_screen,
        "transfers",
        FleetTransfer,
        named("transfers", lambda one: one.transfer_id),
    ),
    View(FleetGroups, fleet_groups_screen),
)
