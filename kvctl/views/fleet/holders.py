"""The FleetPrefixHolders document: what `kvctl prefix --fleet` prints."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvctl.cli.units import Count, filled
from kvctl.views.fleet.differing import differing
from kvctl.views.fleet.unanswered import HOST, FleetOf, unanswered_screen
from kvctl.views.prefixes.prefix import PrefixHolding, holder_columns, holder_names, most_first
from kvctl.views.registry import View
from kvctl.views.screen import ScreenPart


class FleetPrefixHolding(PrefixHolding, frozen=True, kw_only=True):
    """What one engine holds of a prompt, or of a block, as the kvd of its own host sees it."""

    host: Annotated[str, Meta(description="host:port at which its kvd was asked")]


class FleetPrefixHolders(FleetOf, frozen=True, kw_only=True):
    """What the engines of all known hosts that share prefixes hold of a prompt, or of a block."""

    asked: Literal["tokens", "block"]
    tokens: Annotated[Count | None, Meta(description="of the prompt; null of a block")]
    holders: tuple[FleetPrefixHolding, ...]


def fleet_holder(host: str, holding: PrefixHolding) -> FleetPrefixHolding:
    """What an engine holds, with its host."""
    return filled(FleetPrefixHolding, holding, host=host)


def fleet_holders_screen(body: FleetPrefixHolders, wide: bool) -> ScreenPart:
    """One engine a line, who holds most of it first."""
    holders = most_first(body.holders)
    name, *others = holder_columns(holders, body.tokens, wide)
    return [differing(holders, name, HOST, *others, whole=True), *unanswered_screen(body.unanswered)]


VIEWS = (
    View(
        FleetPrefixHolders,
        fleet_holders_screen,
        "holders",
        FleetPrefixHolding,
        {"name": lambda body: holder_names(body.holders)},
    ),
)
