"""`kvctl workers`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl import daemon
from kvctl.cli.options import Watch
from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.views.output import show_repeatedly
from kvctl.views.workers import Workers, worker_document

SECTION = "Look"


def workers(
    settings: Settings,
    *,
    engine: Annotated[
        str | None, typer.Option("--engine", "-e", metavar="ENGINE", help="Only workers of this engine.")
    ] = None,
    watch: Watch = None,
) -> None:
    """The local workers and schedulers registered with kvd.

    HEARD is how long ago a process was last heard of, MEMORY what it registered with its backend.
    """

    def fetch() -> Workers:
        rows = daemon.workers(settings)
        if unseen := sum(row.hidden for row in rows):
            names = "workers and schedulers of other users with their names and states alone"
            say(daemon.hidden(unseen, names))
        return Workers(workers=tuple(worker_document(row) for row in rows if engine in (None, row.engine_id)))

    show_repeatedly(fetch, settings, watch)
