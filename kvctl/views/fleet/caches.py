"""The FleetCaches document: what `kvctl cache --fleet` prints."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvctl.cli.units import filled
from kvctl.views.fleet.differing import differing
from kvctl.views.fleet.unanswered import FleetOf, unanswered_screen
from kvctl.views.prefixes.cache import Cache, cache_columns
from kvctl.views.registry import View, named
from kvctl.views.screen import ScreenPart


class FleetCache(Cache, frozen=True, kw_only=True):
    """An engine that shares prefixes, as the kvd of its own host sees it."""

    host: Annotated[str, Meta(description="host:port at which its kvd was asked")]

    @property
    def afar(self) -> bool:
        """Each is told of by its own kvd."""
        return False


class FleetCaches(FleetOf, frozen=True, kw_only=True):
    """The engines of all known hosts that share prefixes."""

    caches: tuple[FleetCache, ...]


def fleet_cache(host: str, cache: Cache) -> FleetCache:
    """An engine with its host."""
    return filled(FleetCache, cache, host=host)


def fleet_caches_screen(body: FleetCaches, wide: bool) -> ScreenPart:
    """One engine a line, with the columns in which they differ, all of them when wide."""
    return [
        differing(body.caches, *cache_columns(body.caches, wide), whole=wide),
        *unanswered_screen(body.unanswered),
    ]


VIEWS = (
    View(
        FleetCaches, fleet_caches_screen, "caches", FleetCache, named("caches", lambda cache: cache.engine_id)
    ),
)
