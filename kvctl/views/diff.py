"""The Diff document: what `kvctl diff` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from kvctl.cli.units import filled
from kvctl.views.registry import View
from kvctl.views.screen import Cell, Column, Indented, ScreenPart, Styled, table
from kvctl.views.topology.flows import shape
from kvd.topology.describe import EngineSummary
from kvd.topology.findings import FAILED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.topology.compat import Factor


class DiffFactor(Struct, frozen=True, kw_only=True):
    """One thing that both engines were compared by."""

    name: str
    local: str
    remote: str
    differs: Annotated[
        bool, Meta(description="false also for two names of one thing, and where one side does not tell")
    ]
    ok: Annotated[bool, Meta(description="false where the difference cannot be handled")]
    note: Annotated[str, Meta(description="reason or cost of the difference; may be empty")]


class Diff(Struct, frozen=True, kw_only=True):
    """Two engines, factor by factor."""

    local: EngineSummary
    remote: EngineSummary
    same: Annotated[bool, Meta(description="no factor differs")]
    compatible: Annotated[bool, Meta(description="local can read from remote")]
    factors: tuple[DiffFactor, ...]


def diff_document(local: EngineSummary, remote: EngineSummary, factors: Sequence[Factor]) -> Diff:
    """The document of two engines and what they were compared by."""
    return Diff(
        local=local,
        remote=remote,
        same=not any(factor.differs for factor in factors),
        compatible=all(factor.ok for factor in factors),
        factors=tuple(filled(DiffFactor, factor) for factor in factors),
    )


def diff_screen(body: Diff, wide: bool) -> ScreenPart:
    """The two engines, then the factors that differ and how many agree; all of them when wide."""
    shown = [factor for factor in body.factors if wide or factor.differs]
    parts: list[ScreenPart] = [
        ("local   ", Styled(body.local.engine_id, "bold"), f" ({shape(body.local)})"),
        ("remote  ", Styled(body.remote.engine_id, "bold"), f" ({shape(body.remote)})"),
        "",
    ]
    if shown:
        factors = table(
            shown,
            Column("FACTOR", lambda f: f.name),
            Column("LOCAL", lambda f: f.local),
            Column("REMOTE", lambda f: f.remote),
            Column("DIFFERENCE", _difference),
            Column("NOTE", lambda f: f.note or "-"),
        )
        parts += [factors, ""]
    parts += [Indented(f"{f.name}: {FAILED[f.name][1]}") for f in shown if not f.ok and f.name in FAILED]
    return [*parts, _summary(body)]


def _difference(factor: DiffFactor) -> Cell:
    if not factor.ok:
        return Styled("FATAL", "bold red")
    return Styled("handled", "yellow") if factor.differs else Styled("none", "green")


def _summary(body: Diff) -> ScreenPart:
    differing = sum(factor.differs for factor in body.factors)
    fatal = sum(not factor.ok for factor in body.factors)
    if body.same:
        return Styled(f"no difference in {len(body.factors)} factors", "green")
    so_many = Styled(f"{fatal} fatally", "bold red") if fatal else Styled("all of them handled", "yellow")
    return f"{differing} of {len(body.factors)} factors differ, ", so_many


VIEWS = (View(Diff, diff_screen),)
