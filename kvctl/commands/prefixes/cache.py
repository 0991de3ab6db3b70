"""`kvctl cache`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from kvctl import daemon
from kvctl.cli.options import FiltersOption, LongListSettings, WatchOption
from kvctl.cli.talk import say
from kvctl.views.output import show_repeatedly
from kvctl.views.picking import picking
from kvctl.views.prefixes.cache import Cache, Caches, cache_columns, cache_document
from kvd.wire.prefixes.cache import CacheList, ListCaches

SECTION = "Look"
EXAMPLES = (
    "kvctl cache -w",
    "kvctl cache -o json",
)
SORTS: dict[str, Callable[[Cache], Any]] = {
    "engine": lambda one: (one.host or "", one.engine_id),
    "host": lambda one: (one.host or "", one.engine_id),
}


def cache(
    settings: LongListSettings,
    *,
    filters: FiltersOption = None,
    sort: Annotated[
        str | None, typer.Option("--sort", metavar="COLUMN", help="Which come first. [engines here first]")
    ] = None,
    watch: WatchOption = None,
) -> None:
    """What engines hold in their prefix caches, and what of that others read.

    GIVEN is what other engines read of this one and used, by worker; LOST what they read while it gave the blocks away.
    TAKEN is what it read of others and used, MISSED what it could not use. All since kvd was started. Of engines of
    other hosts only the hints are known that their kvd tells. kvctl transfers has each read.
    """
    wanted = picking(cache_columns(wide=True), filters, sort, SORTS)

    def fetch() -> Caches:
        rows = daemon.ask(settings, ListCaches(), CacheList).rows
        if unseen := sum(row.hidden for row in rows):
            say(daemon.hidden(unseen, "engines of other users are not shown"))
        every = [cache_document(row) for row in rows if not row.hidden]
        found = wanted.of(every)
        if not found and watch is None:
            say(
                f"none of {len(every)} has {wanted}"
                if every
                else 'no engine here shares prefixes: "prefixes": "on" in its connector\'s settings has it share them'
            )
        return Caches(caches=found)

    show_repeatedly(fetch, settings, watch)
