"""`kvctl leases`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import typer

from kvctl import daemon
from kvctl.cli import numbers
from kvctl.cli.options import FiltersOption, FleetOption, LongListSettings, WatchOption
from kvctl.cli.talk import say
from kvctl.commands.running.leases.rows import every_lease
from kvctl.views.fleet.leases import FleetLeases, fleet_lease
from kvctl.views.fleet.unanswered import HOST, asked, show_fleet
from kvctl.views.output import show_repeatedly
from kvctl.views.picking import picking
from kvctl.views.running.leases import LeaseDocument, LeasesDocument, lease_columns, lease_document
from kvd.wire.query import LeaseRow

SECTION = "Look"
EXAMPLES = (
    "kvctl leases --engine prefill-0",
    "kvctl leases -w",
)
SORTS: dict[str, Callable[[LeaseDocument], Any]] = {
    "age": lambda one: -one.age,
    "left": lambda one: one.left,
    "blocks": lambda one: -(one.blocks or 0),
    "engine": lambda one: (one.engine_id, one.request_id),
    "host": lambda one: (getattr(one, "host", one.endpoint or ""), -one.age),
}


def leases(
    context: typer.Context,
    settings: LongListSettings,
    *,
    engine: Annotated[
        str,
        typer.Option(
            "--engine", "-e", metavar="ENGINE", help="Only leases that this engine gave or claimed."
        ),
    ] = "",
    unclaimed: Annotated[
        bool, typer.Option("--unclaimed", help="Only leases that nobody has claimed.")
    ] = False,
    filters: FiltersOption = None,
    sort: Annotated[
        str, typer.Option("--sort", metavar="COLUMN", show_default=False, help="Which come first. [age]")
    ] = "age",
    fleet: FleetOption = False,
    watch: WatchOption = None,
) -> None:
    """The blocks that prefillers keep for decoders: whose, for whom, how long.

    A lease is there from the side that gives it, the prefiller's, and from the side that claims it. LEFT is how long
    it is kept unless its reader asks for more. `kvctl leases release` ends one. With --fleet those of all known hosts;
    exit code 4 where some did not answer.
    """
    if context.invoked_subcommand is not None:
        return

    columns = [*lease_columns(wide=True), *([HOST] if fleet else [])]
    wanted = picking(columns, filters, sort, SORTS)
    which = (
        "lease"
        + (f" of {engine}" if engine else "")
        + (" that nobody has claimed" if unclaimed else "")
        + (f" with {wanted}" if wanted.wanted else "")
    )

    def documents(rows: Iterable[LeaseRow]) -> Iterator[LeaseDocument]:
        now = numbers.now()
        return (lease_document(row, now) for row in rows if not unclaimed or not row.readers)

    def fetch() -> LeasesDocument:
        found = wanted.of(documents(every_lease(settings, engine)))
        if not found and watch is None:
            say(f"no {which} is open at this kvd, and no engine here reads under one")
        return LeasesDocument(leases=found)

    def fetch_all() -> FleetLeases:
        found = daemon.fleet(settings, lambda one: every_lease(one, engine))
        every = (fleet_lease(host, one) for host, rows in found.answers.items() for one in documents(rows))
        leases = wanted.of(every)
        if not leases and watch is None and found.answers:
            say(f"no host that answered has an open {which}")
        return FleetLeases(leases=leases, **asked(found))

    if fleet:
        show_fleet(fetch_all, settings, watch)
    else:
        show_repeatedly(fetch, settings, watch)
