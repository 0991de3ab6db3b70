"""The FleetTopology document: what `kvctl describe-topology --fleet` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from kvctl.cli.numbers import size
from kvctl.cli.units import filled
from kvctl.views.fleet.unanswered import FleetOf, unanswered_screen
from kvctl.views.folded.names import name_set
from kvctl.views.registry import View
from kvctl.views.screen import Column, ScreenPart, number, spaced, table, yes_or_no
from kvctl.views.topology.document import PairDocument, Topology
from kvctl.views.topology.dot import topology_dot
from kvctl.views.topology.flows import shape
from kvctl.views.topology.mermaid import topology_mermaid
from kvctl.views.topology.screen import pair_screen
from kvctl.views.topology.svg import topology_svg


class EngineOfHost(Struct, frozen=True, kw_only=True):
    """An engine, and the kvd that it is registered with."""

    engine_id: str
    host: str


class FleetPair(PairDocument, frozen=True, kw_only=True):
    """Engines of one kind that read from engines of another: what is said of ``local`` and ``remote`` holds of each."""

    readers: Annotated[tuple[EngineOfHost, ...], Meta(description="engines that are as local is")]
    sources: Annotated[tuple[EngineOfHost, ...], Meta(description="engines that are as remote is")]


class FleetTopology(FleetOf, frozen=True, kw_only=True):
    """Who reads which bytes from whom, of all known hosts; engines that are alike are told of once."""

    pairs: tuple[FleetPair, ...]


def fleet_pair(
    pair: PairDocument, readers: Sequence[tuple[str, str]], sources: Sequence[tuple[str, str]]
) -> FleetPair:
    """A described pair, and all engines that it stands for."""
    return filled(FleetPair, pair, readers=_engines(readers), sources=_engines(sources))


def fleet_topology_screen(body: FleetTopology, wide: bool) -> ScreenPart:
    """A line for each two kinds of engines; below it each whole, where there is one alone, it does not fit, or wide."""
    whole = [pair for pair in body.pairs if wide or len(body.pairs) == 1 or not pair.compatible]
    lines = table(
        body.pairs,
        Column("TO", lambda pair: _names(pair.readers)),
        number("READERS", lambda pair: f"x{len(pair.readers)}"),
        Column("FROM", lambda pair: _names(pair.sources)),
        number("SOURCES", lambda pair: f"x{len(pair.sources)}"),
        Column("SHAPES", lambda pair: f"{_shape(shape(pair.local))} from {_shape(shape(pair.remote))}"),
        Column("FIT", lambda pair: yes_or_no(good=pair.compatible)),
        number("A REQUEST", lambda pair: size(pair.request.bytes) if pair.request else "-"),
        Column("NOTE", _note),
    )
    parts = [lines, *(pair_screen(pair, wide) for pair in whole)] if body.pairs else []
    return [*spaced(parts), *unanswered_screen(body.unanswered)]


def _engines(found: Sequence[tuple[str, str]]) -> tuple[EngineOfHost, ...]:
    return tuple(EngineOfHost(engine_id=name, host=host) for name, host in found)


def _names(engines: Sequence[EngineOfHost]) -> str:
    return name_set(one.engine_id for one in engines)


def _shape(told: str) -> str:
    return told.partition(",")[0]


def _note(pair: FleetPair) -> str:
    differs = [f"{one.name} differs" for one in pair.factors if not one.ok]
    return (
        ", ".join((*differs, *dict.fromkeys(one.code for one in pair.findings if one.severity != "info")))
        or "-"
    )


def _as_topology(body: FleetTopology) -> Topology:
    return Topology(pairs=body.pairs)


VIEWS = (
    View(
        FleetTopology,
        fleet_topology_screen,
        "pairs",
        FleetPair,
        {
            "dot": lambda body: topology_dot(_as_topology(body)),
            "mermaid": lambda body: topology_mermaid(_as_topology(body)),
            "svg": lambda body: topology_svg(_as_topology(body)),
        },
    ),
)
