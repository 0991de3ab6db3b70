"""`kvctl agents`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from kvctl import daemon
from kvctl.cli.options import FiltersOption, FleetOption, LongListSettings, WatchOption
from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.views.fleet.agents import FleetAgents, fleet_agent
from kvctl.views.fleet.unanswered import HOST, asked, show_fleet
from kvctl.views.output import show_repeatedly
from kvctl.views.picking import picking
from kvctl.views.running.agents import AgentDocument, AgentsDocument, agent_columns, agent_document
from kvd.wire.agent import AgentList, AgentRow, ListAgents

SECTION = "Look"
EXAMPLES = (
    "kvctl agents --peer prefill-0",
    "kvctl agents --filter state=gone",
)
SORTS: dict[str, Callable[[AgentDocument], Any]] = {
    "engine": lambda one: (one.engine_id, one.rank, one.peer or ""),
    "host": lambda one: (getattr(one, "host", ""), one.engine_id),
}


def agents(
    context: typer.Context,
    settings: LongListSettings,
    *,
    engine: Annotated[
        str, typer.Option("--engine", "-e", metavar="ENGINE", help="Only what workers of this engine hold.")
    ] = "",
    peer: Annotated[
        str, typer.Option("--peer", metavar="ENGINE", help="Only what is held of this engine.")
    ] = "",
    filters: FiltersOption = None,
    sort: Annotated[
        str | None, typer.Option("--sort", metavar="COLUMN", help="Which come first. [engine by engine]")
    ] = None,
    fleet: FleetOption = False,
    watch: WatchOption = None,
) -> None:
    """What each worker holds of its peers: lanes, mapped memory, bytes that are pinned.

    MAPPED is memory of the peer in the worker's process; the peer's end does not free it. PINNED is the same of a peer
    that does not live, or may not. A lane is closed by itself when kvd hears that its peer has ended;
    `kvctl agents evict` closes what is left. With --fleet those of all known hosts; exit code 4 where some did not
    answer.
    """
    if context.invoked_subcommand is not None:
        return

    columns = [*agent_columns(wide=True), *([HOST] if fleet else [])]
    wanted = picking(columns, filters, sort, SORTS)
    by = f" of {engine}" if engine else ""
    of = (f" of {peer}" if peer else "") + (f" with {wanted}" if wanted.wanted else "")

    def rows(one: Settings) -> tuple[AgentRow, ...]:
        return daemon.ask(one, ListAgents(engine_id=peer), AgentList).rows

    def documents(found: tuple[AgentRow, ...]) -> list[AgentDocument]:
        return [agent_document(row) for row in found if engine in ("", row.engine_id) and not row.hidden]

    def fetch() -> AgentsDocument:
        every = rows(settings)
        if unseen := sum(row.hidden for row in every):
            say(daemon.hidden(unseen, "workers of other users are not shown"))
        found = wanted.of(documents(every))
        if not found and watch is None:
            say(f"no worker{by} at this kvd holds anything{of}")
        return AgentsDocument(agents=found)

    def fetch_all() -> FleetAgents:
        found = daemon.fleet(settings, rows)
        every = (fleet_agent(host, one) for host, some in found.answers.items() for one in documents(some))
        agents = wanted.of(every)
        if not agents and watch is None and found.answers:
            say(f"no worker{by} at a host that answered holds anything{of}")
        return FleetAgents(agents=agents, **asked(found))

    if fleet:
        show_fleet(fetch_all, settings, watch)
    else:
        show_repeatedly(fetch, settings, watch)
