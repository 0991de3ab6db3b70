"""`kvctl leases`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl.cli import numbers
from kvctl.cli.options import ListSettings, Watch
from kvctl.cli.talk import say
from kvctl.commands.running.leases.rows import every_lease
from kvctl.views.output import show_repeatedly
from kvctl.views.running.leases import LeasesDocument, lease_document

SECTION = "Look"
EXAMPLES = (
    "kvctl leases --engine prefill-0",
    "kvctl leases -w",
)


def leases(
    context: typer.Context,
    settings: ListSettings,
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
    watch: Watch = None,
) -> None:
    """The blocks that prefillers keep for decoders: whose, for whom, how long.

    A lease is there from the side that gives it, the prefiller's, and from the side that claims it. LEFT is how long
    it is kept unless its reader asks for more. `kvctl leases release` ends one.
    """
    if context.invoked_subcommand is not None:
        return

    def fetch() -> LeasesDocument:
        rows = every_lease(settings, engine)
        now = numbers.now()
        found = tuple(
            lease_document(row, now)
            for row in sorted(rows, key=lambda row: -row.age)
            if not unclaimed or not row.readers
        )
        if not found and watch is None:
            whose = f" of {engine}" if engine else ""
            which = " that nobody has claimed" if unclaimed else ""
            say(f"no lease{whose}{which} is open at this kvd, and no engine here reads under one")
        return LeasesDocument(leases=found)

    show_repeatedly(fetch, settings, watch)
