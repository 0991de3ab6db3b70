"""`kvctl engines`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, get_args

import typer

from kvctl import daemon
from kvctl.cli.option_kinds import choice
from kvctl.cli.options import FiltersOption, FleetOption, LongListSettings, WatchOption
from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.views.engines import EngineDocument, Engines, endpoint_name, engine_columns, engine_document
from kvctl.views.fleet.engines import FleetEngines, fleet_engine
from kvctl.views.fleet.unanswered import HOST, asked, show_fleet
from kvctl.views.output import show_repeatedly
from kvctl.views.picking import Picking, picking
from kvd.wire.identity import Role
from kvd.wire.outcomes import GetOutcomes, OutcomeCount
from kvd.wire.query import EngineRow

SECTION = "Look"
EXAMPLES = (
    "kvctl engines -w  # drawn anew every 2 s",
    "kvctl engines --filter state=partial --sort since",
    "kvctl engines -o name | xargs -n1 kvctl transfers --engine",
)
WITHOUT_SERVED = ("table", "folded")
"""Forms that do not show what became of requests."""
STATES = ("ready", "partial", "gone", "unreachable")
SORTS: dict[str, Callable[[EngineDocument], Any]] = {
    "name": lambda one: one.engine_id,
    "host": lambda one: (getattr(one, "host", one.endpoint or ""), one.engine_id),
    "model": lambda one: (one.model, one.engine_id),
    "role": lambda one: (one.role, one.engine_id),
    "state": lambda one: (one.state, one.engine_id),
    "newest": lambda one: -one.since.timestamp(),
    "leases": lambda one: -one.leases,
}


@dataclass(frozen=True)
class _EngineFilter:
    """Which engines are shown; None: all."""

    state: str | None
    role: str | None
    model: str | None
    local: bool
    picking: Picking

    def __contains__(self, row: EngineRow) -> bool:
        return (
            self.state in (None, row.state)
            and self.role in (None, row.engine.role)
            and (self.model is None or fnmatchcase(row.engine.model, self.model))
            and (row.local or not self.local)
        )

    def __str__(self) -> str:
        return " and ".join(
            filter(None, (self.state, self.role, self.model, "local" * self.local, str(self.picking)))
        )


def engines(  # noqa: PLR0913 (options)
    settings: LongListSettings,
    *,
    state: Annotated[str | None, choice("--state", STATES, help="Only engines in this state.")] = None,
    role: Annotated[str | None, choice("--role", get_args(Role), help="Only engines of this role.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="PATTERN", help="Only of this model; * and ? stand for any."),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Only engines of this host.")] = False,
    filters: FiltersOption = None,
    sort: Annotated[
        str | None,
        typer.Option("--sort", metavar="COLUMN", help="Which come first; also newest. [local ones]"),
    ] = None,
    fleet: FleetOption = False,
    watch: WatchOption = None,
) -> None:
    """The engines that kvd knows, local ones and peers'.

    With -o wide also generation, place, policy, open leases, what became of the prompts of the last minute's requests,
    and PEERS: engines whose handshake is done, and kvds of other hosts that use it. With --fleet each engine of all
    known hosts, as its own kvd sees it, and what all have in common stands above; exit code 4 where some hosts did not
    answer.
    """
    columns = [*engine_columns((), wide=True), *([HOST] if fleet else [])]
    wanted = _EngineFilter(state, role, model, local or fleet, picking(columns, filters, sort, SORTS))

    def fetch() -> Engines:
        rows = daemon.engines(settings)
        if unseen := sum(row.hidden for row in rows):
            names = "engines of other users with their names and states alone"
            say(daemon.hidden(unseen, names))
        served = {} if settings.output in WITHOUT_SERVED else _served(settings)
        documents = (
            engine_document(row, served.get(row.engine.engine_id, ()) if row.local else ())
            for row in rows
            if row in wanted
        )
        shown = wanted.picking.of(documents)
        if not shown and watch is None:
            say(
                f"none of the {len(rows)} engines that kvd knows is {wanted}"
                if rows
                else "kvd knows no engine; kvctl doctor says what an engine needs"
            )
        return Engines(engines=shown)

    if fleet:
        show_fleet(lambda: _fleet(settings, wanted, watched=watch is not None), settings, watch)
    else:
        show_repeatedly(fetch, settings, watch)


def _fleet(settings: Settings, wanted: _EngineFilter, *, watched: bool) -> FleetEngines:
    def fetch(of_host: Settings) -> list[tuple[EngineRow, tuple[OutcomeCount, ...]]]:
        rows = [row for row in daemon.engines(of_host) if row in wanted]
        served = {} if settings.output in WITHOUT_SERVED else _served(of_host)
        return [(row, served.get(row.engine.engine_id, ())) for row in rows]

    found = daemon.fleet(settings, fetch)
    engines = wanted.picking.of(
        fleet_engine(host, engine_document(row, lately))
        for host, rows in found.answers.items()
        for row, lately in rows
        # An engine on several hosts is told of by its home alone.
        if (home := endpoint_name(row.endpoint)) == host or home not in found.answers
    )
    if not engines and not watched and found.answers:
        which = str(replace(wanted, local=False))
        say("no host that answered has an engine" + (f" that is {which}" if which else ""))
    return FleetEngines(engines=engines, **asked(found))


def _served(settings: Settings) -> dict[str, tuple[OutcomeCount, ...]]:
    return {row.engine_id: row.lately for row in daemon.outcomes(settings, GetOutcomes())}
