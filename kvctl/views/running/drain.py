"""The Drains document: what `kvctl drain` prints."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvctl.cli.numbers import span
from kvctl.cli.units import Count, Seconds, filled
from kvctl.views.registry import View, named
from kvctl.views.screen import Column, ScreenPart, number, state, table
from kvd.wire.drain import DrainRow, EnginesDraining
from kvd.wire.identity import Role


class EngineDrain(Struct, frozen=True, kw_only=True):
    """How far an engine is with handing over what it holds."""

    engine_id: str
    role: Role
    draining: bool
    age: Annotated[Seconds, Meta(description="seconds since it was told; 0 where it does not drain")]
    grace: Annotated[Seconds, Meta(description="seconds until it takes nothing new")]
    held: Annotated[Count, Meta(description="all that keeps it from being stopped, together; 0: stop it")]
    leases: Annotated[Count, Meta(description="leases that it gave and that are open")]
    claimed: Annotated[Count, Meta(description="those of them that somebody claimed; 0 unless it drains")]
    reads: Annotated[Count, Meta(description="leases of others that it reads under; 0 unless it drains")]
    prefills: Annotated[
        Count | None, Meta(description="requests that it computes for a decoder; null where it does not say")
    ]
    pushes: Annotated[
        Count | None,
        Meta(description="requests that it pushes, or keeps for that; null where it does not say"),
    ]
    loads: Annotated[
        Count | None,
        Meta(description="requests whose KV it waits for or loads; null where it does not say"),
    ]
    note: Annotated[str, Meta(description="why its scheduler does not say")]


class Drains(Struct, frozen=True, kw_only=True):
    """Engines of a host, and what each of them still holds."""

    host: Annotated[bool, Meta(description="engines that come to this kvd will drain too")]
    engines: tuple[EngineDrain, ...]


def drains_document(answer: EnginesDraining) -> Drains:
    """The document of kvd's answer."""
    return Drains(host=answer.host, engines=tuple(_engine(row) for row in answer.rows))


def _engine(row: DrainRow) -> EngineDrain:
    return filled(EngineDrain, row, age=max(0.0, row.age), grace=max(0.0, row.grace))


def drains_screen(body: Drains, wide: bool) -> ScreenPart:
    """One engine a line."""
    notes = wide or any(engine.note for engine in body.engines)
    rows = table(
        body.engines,
        Column("ENGINE", lambda e: e.engine_id),
        Column("ROLE", lambda e: e.role),
        Column("STATE", lambda e: state(_state(e))),
        number("SINCE", lambda e: span(e.age) if e.draining else None),
        number("GRACE", lambda e: span(e.grace) if e.draining else None, wide),
        number("LEASES", lambda e: e.leases),
        number("CLAIMED", lambda e: e.claimed if e.draining else None, wide),
        number("READS", lambda e: e.reads if e.draining else None),
        number("PREFILLS", lambda e: e.prefills),
        number("PUSHES", lambda e: e.pushes),
        number("LOADS", lambda e: e.loads),
        Column("NOTE", lambda e: e.note or "-", notes),
    )
    later = "engines that come to this kvd later drain too: kvctl drain HOST --undo ends that"
    return [rows, "", later] if body.host else rows


def _state(engine: EngineDrain) -> str:
    if not engine.draining:
        return "serving"
    return "draining" if engine.held or engine.grace else "drained"


VIEWS = (View(Drains, drains_screen, "engines", EngineDrain, named("engines", lambda one: one.engine_id)),)
