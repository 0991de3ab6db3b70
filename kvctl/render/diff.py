"""Draws the Diff document: every factor, with what its difference means."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from kvctl.views.diff import Diff, DiffFactor
from kvctl.views.table import column_table
from kvctl.views.topology.flows import shape


def diff_screen(body: Diff, wide: bool) -> RenderableType:
    """The two engines, then the factors that differ and how many agree; all of them when wide."""
    shown = [factor for factor in body.factors if wide or factor.differs]
    parts: list[RenderableType] = [
        Text.assemble("local   ", (body.local.engine_id, "bold"), f" ({shape(body.local)})"),
        Text.assemble("remote  ", (body.remote.engine_id, "bold"), f" ({shape(body.remote)})"),
        "",
    ]
    if shown:
        rows: list[list[str | Text]] = [
            [f.name, f.local, f.remote, _verdict(f), f.note or "-"] for f in shown
        ]
        parts += [column_table(["FACTOR", "LOCAL", "REMOTE", "DIFFERENCE", "NOTE"], rows), ""]
    return Group(*parts, _summary(body))


def _verdict(factor: DiffFactor) -> Text:
    if not factor.ok:
        return Text("FATAL", "bold red")
    return Text("handled", "yellow") if factor.differs else Text("none", "green")


def _summary(body: Diff) -> Text:
    differing = sum(factor.differs for factor in body.factors)
    fatal = sum(not factor.ok for factor in body.factors)
    if body.same:
        return Text(f"no difference in {len(body.factors)} factors", "green")
    text = Text(f"{differing} of {len(body.factors)} factors differ, ")
    return (
        text.append(f"{fatal} fatally", "bold red") if fatal else text.append("all of them handled", "yellow")
    )
