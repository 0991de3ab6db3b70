"""`kvctl cache`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

import typer

from kvctl import daemon
from kvctl.cli.options import FiltersOption, FleetOption, LongListSettings, WatchOption
from kvctl.cli.talk import say
from kvctl.commands.prefixes.rows import seen
from kvctl.views.fleet.caches import FleetCaches, fleet_cache
from kvctl.views.fleet.unanswered import asked, show_fleet
from kvctl.views.output import show_repeatedly
from kvctl.views.picking import picking
from kvctl.views.prefixes.cache import Cache, Caches, cache_columns, cache_document
from kvd.wire.identity import HERE
from kvd.wire.prefixes.cache import CacheList, CacheRow, ListCaches

SECTION = "Look"
EXAMPLES = (
    "kvctl cache -w",
    "kvctl cache --fleet --sort blocks",
    "kvctl cache -o json",
)
SORTS: dict[str, Callable[[Cache], Any]] = {
    "engine": lambda one: (one.host or "", one.engine_id),
    "host": lambda one: (one.host or "", one.engine_id),
}

Found = TypeVar("Found", bound=Cache)


def cache(
    settings: LongListSettings,
    *,
    filters: FiltersOption = None,
    sort: Annotated[
        str | None, typer.Option("--sort", metavar="COLUMN", help="Which come first. [engines here first]")
    ] = None,
    fleet: FleetOption = False,
    watch: WatchOption = None,
) -> None:
    """What engines hold in their prefix caches, and what of that others read.

    GIVEN is what other engines read of this one and used, by worker; LOST what they read while it gave the blocks away.
    BUSY counts questions that it turned down, since reads had cost it more than prefix_cost. TAKEN is what it read of
    others and used, MISSED what it could not use. All since kvd was started. Of engines of other hosts only the hints
    are known that their kvd tells; with --fleet each is asked for by its own kvd; exit code 4 where some hosts did not
    answer. kvctl transfers has each read.
    """
    wanted = picking(cache_columns(wide=True), filters, sort, SORTS)

    def picked(
        rows: Iterable[tuple[str, CacheRow]], where: str, made: Callable[..., Found]
    ) -> tuple[Found, ...]:
        may_see = seen(rows, where, watched=watch is not None)
        found = wanted.of(made(host, cache_document(row)) for host, row in may_see)
        if may_see and not found and watch is None:
            say(f"none of {len(may_see)} has {wanted}")
        return found

    def fetch() -> Caches:
        rows = daemon.ask(settings, ListCaches(), CacheList).rows
        return Caches(caches=picked((("", row) for row in rows), "here", lambda _, one: one))

    def fetch_all() -> FleetCaches:
        answers = daemon.fleet(settings, lambda one: daemon.ask(one, ListCaches(), CacheList).rows)
        every = ((host, row) for host, rows in answers.answers.items() for row in rows)
        # Others, of which a kvd knows the hints alone, are told of by their own.
        own = ((host, row) for host, row in every if row.endpoint == HERE)
        return FleetCaches(caches=picked(own, "of these hosts", fleet_cache), **asked(answers))

    if fleet:
        show_fleet(fetch_all, settings, watch)
    else:
        show_repeatedly(fetch, settings, watch)
