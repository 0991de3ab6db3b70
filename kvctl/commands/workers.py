"""`kvctl workers`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl import daemon
from kvctl.cli.options import ListSettings, Watch
from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.views.engines import endpoint_name
from kvctl.views.output import show_repeatedly
from kvctl.views.workers import Workers, worker_document

SECTION = "Look"
EXAMPLES = (
    "kvctl workers --engine decode-0",
    "kvctl workers -w",
)


def workers(
    settings: ListSettings,
    *,
    engine: Annotated[
        str | None, typer.Option("--engine", "-e", metavar="ENGINE", help="Only workers of this engine.")
    ] = None,
    watch: Watch = None,
) -> None:
    """The local workers and schedulers registered with kvd.

    HEARD is how long ago a process was last heard of, MEMORY what it registered with its backend. Exit code 2 where kvd
    knows no engine of that id, unless it is waited for with --watch.
    """

    def fetch() -> Workers:
        rows = daemon.workers(settings)
        if unseen := sum(row.hidden for row in rows):
            names = "workers and schedulers of other users with their names and states alone"
            say(daemon.hidden(unseen, names))
        found = tuple(worker_document(row) for row in rows if engine in (None, row.engine_id))
        if not found and watch is None:
            say(_why_none(settings, engine))
        return Workers(workers=found)

    show_repeatedly(fetch, settings, watch)


def _why_none(settings: Settings, engine: str | None) -> str:
    """Why there is no worker to show. Raises `UsageError` for an engine that kvd does not know."""
    if engine is None:
        return "no worker is registered with this kvd; kvctl doctor says what an engine needs"
    from kvctl.engines.sources import known_row

    row = known_row(daemon.engines(settings), engine)
    where = endpoint_name(row.endpoint)
    return f"{engine} has no worker here" + (f": it is an engine of the kvd at {where}" if where else "")
