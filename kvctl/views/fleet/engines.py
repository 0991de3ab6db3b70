"""The FleetEngines document: what `kvctl engines --fleet` prints."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvctl.cli.units import filled
from kvctl.views.engines import EngineDocument, engine_columns
from kvctl.views.fleet.differing import differing
from kvctl.views.fleet.unanswered import HOST, FleetOf, unanswered_screen
from kvctl.views.registry import View, named
from kvctl.views.screen import ScreenPart


class FleetEngine(EngineDocument, frozen=True, kw_only=True):
    """One engine, as the kvd of its own host sees it."""

    host: Annotated[str, Meta(description="host:port at which its kvd was asked")]


class FleetEngines(FleetOf, frozen=True, kw_only=True):
    """The engines of all known hosts."""

    engines: tuple[FleetEngine, ...]


def fleet_engine(host: str, engine: EngineDocument) -> FleetEngine:
    """An engine with its host."""
    return filled(FleetEngine, engine, host=host)


def fleet_engines_screen(body: FleetEngines, wide: bool) -> ScreenPart:
    """One engine a line, with the columns in which they differ, all of them when wide."""
    name, *others = engine_columns(body.engines, wide)
    return [
        differing(body.engines, name, HOST, *others, whole=wide),
        *unanswered_screen(body.unanswered),
    ]


VIEWS = (
    View(
        FleetEngines,
        fleet_engines_screen,
        "engines",
        FleetEngine,
        named("engines", lambda one: one.engine_id),
    ),
)
