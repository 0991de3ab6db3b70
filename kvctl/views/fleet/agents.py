"""The FleetAgents document: what `kvctl agents --fleet` prints."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvctl.cli.units import filled
from kvctl.views.fleet.differing import differing
from kvctl.views.fleet.unanswered import HOST, FleetOf, unanswered_screen
from kvctl.views.registry import View
from kvctl.views.running.agents import AgentDocument, agent_columns, agent_names, pinned_lines
from kvctl.views.screen import ScreenPart


class FleetAgent(AgentDocument, frozen=True, kw_only=True):
    """One worker with one thing that it holds of a peer engine, or with nothing."""

    host: Annotated[str, Meta(description="host:port of the kvd that told of it")]


class FleetAgents(FleetOf, frozen=True, kw_only=True):
    """What the workers of all known hosts hold of their peers."""

    agents: tuple[FleetAgent, ...]


def fleet_agent(host: str, agent: AgentDocument) -> FleetAgent:
    """A row with the host whose kvd told of it."""
    return filled(FleetAgent, agent, host=host)


def fleet_agents_screen(body: FleetAgents, wide: bool) -> ScreenPart:
    """One holding a line, with the columns in which they differ, all of them when wide."""
    name, rank, *others = agent_columns(body.agents, wide)
    return [
        differing(body.agents, name, rank, HOST, *others, whole=wide),
        *pinned_lines(body.agents),
        *unanswered_screen(body.unanswered),
    ]


VIEWS = (
    View(
        FleetAgents,
        fleet_agents_screen,
        "agents",
        FleetAgent,
        {"name": lambda body: agent_names(body.agents)},
    ),
)
