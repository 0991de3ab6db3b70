"""`kvctl workers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from kvctl import daemon
from kvctl.cli.options import FiltersOption, FleetOption, LongListSettings, WatchOption
from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.views.engines import endpoint_name
from kvctl.views.fleet.unanswered import HOST, asked, show_fleet
from kvctl.views.fleet.workers import FleetWorkers, fleet_worker
from kvctl.views.output import show_repeatedly
from kvctl.views.picking import Picking, picking
from kvctl.views.workers import Worker, Workers, worker_columns, worker_document

SECTION = "Look"
EXAMPLES = (
    "kvctl workers --engine decode-0",
    "kvctl workers -w",
)
SORTS: dict[str, Callable[[Worker], Any]] = {
    "engine": lambda one: (one.engine_id, one.rank or ""),
    "host": lambda one: (getattr(one, "host", one.at or ""), one.engine_id),
    "state": lambda one: (one.state, one.engine_id),
    "heard": lambda one: -one.heartbeat_age,
    "memory": lambda one: -one.registered_bytes,
}


def workers(
    settings: LongListSettings,
    *,
    engine: Annotated[
        str | None, typer.Option("--engine", "-e", metavar="ENGINE", help="Only workers of this engine.")
    ] = None,
    filters: FiltersOption = None,
    sort: Annotated[
        str | None, typer.Option("--sort", metavar="COLUMN", help="Which come first. [engine by engine]")
    ] = None,
    fleet: FleetOption = False,
    watch: WatchOption = None,
) -> None:
    """The local workers and schedulers registered with kvd.

    HEARD is how long ago a process was last heard of, MEMORY what it registered with its backend. Exit code 2 where kvd
    knows no engine of that id, unless it is waited for with --watch. With --fleet those of all known hosts; exit code 4
    where some did not answer.
    """
    columns = [*worker_columns((), wide=True), *([HOST] if fleet else [])]
    wanted = picking(columns, filters, sort, SORTS)

    def fetch() -> Workers:
        rows = daemon.workers(settings)
        if unseen := sum(row.hidden for row in rows):
            names = "workers and schedulers of other users with their names and states alone"
            say(daemon.hidden(unseen, names))
        every = [worker_document(row) for row in rows if engine in (None, row.engine_id)]
        found = wanted.of(every)
        if not found and watch is None:
            say(f"none of {len(every)} has {wanted}" if every else _why_none(settings, engine))
        return Workers(workers=found)

    if fleet:
        show_fleet(lambda: _fleet(settings, engine, wanted, watched=watch is not None), settings, watch)
    else:
        show_repeatedly(fetch, settings, watch)


def _fleet(settings: Settings, engine: str | None, wanted: Picking, *, watched: bool) -> FleetWorkers:
    found = daemon.fleet(settings, daemon.workers)
    every = (
        fleet_worker(host, worker_document(row))
        for host, rows in found.answers.items()
        for row in rows
        if engine in (None, row.engine_id) and (row.at is None or str(row.at) not in found.answers)
    )
    workers = wanted.of(every)
    if not workers and not watched and found.answers:
        of = f" of {engine}" if engine else ""
        having = f" with {wanted}" if wanted.wanted else ""
        say(f"no host that answered has a worker{of}{having}")
    return FleetWorkers(workers=workers, **asked(found))


def _why_none(settings: Settings, engine: str | None) -> str:
    """Why there is no worker to show. Raises `UsageError` for an engine that kvd does not know."""
    if engine is None:
        return "no worker is registered with this kvd; kvctl doctor says what an engine needs"
    from kvctl.engines.sources import known_row

    row = known_row(daemon.engines(settings), engine)
    where = endpoint_name(row.endpoint)
    return f"{engine} has no worker here" + (f": it is an engine of the kvd at {where}" if where else "")
