"""Draws the Engines document."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from kvctl.cli.numbers import age
from kvctl.views.engines import Engine, Engines
from kvctl.views.table import column_table, state


def engines_screen(body: Engines, wide: bool) -> RenderableType:
    """One engine a line; the reason stands there as soon as one engine has one."""
    reasons = wide or any(engine.reason for engine in body.engines)
    headers = ["ENGINE", "MODEL", "ROLE", "STATE", "RANKS", "SHAPE", "SINCE"]
    if wide:
        headers += [
            "GENERATION",
            "PLACE",
            "GROUPS",
            "SCHEDULER",
            "POLICY",
            "LEASES",
            "SERVED",
            "WEIGHTS",
            "PEERS",
        ]
    if reasons:
        headers.append("REASON")
    rows: list[list[str | Text]] = []
    for engine in body.engines:
        row: list[str | Text] = [
            engine.engine_id,
            engine.model,
            engine.role,
            state(engine.state),
            f"{len(engine.ranks)}/{engine.world_size}",
            shape(engine),
            age(engine.since),
        ]
        if wide:
            row += [
                engine.generation or "-",
                engine.endpoint or engine.place,
                str(engine.groups),
                "yes" if engine.scheduler else "no",
                engine.policy or "-",
                str(engine.leases),
                ", ".join(f"{count} {outcome}" for outcome, count in engine.served.items()) or "-",
                str(engine.facts.get("weights") or engine.facts.get("weights_source") or "-"),
                ",".join(engine.peers) or "-",
            ]
        if reasons:
            row.append(engine.reason or "-")
        rows.append(row)
    return column_table(headers, rows, right="RANKS SINCE GROUPS LEASES")


def shape(engine: Engine) -> str:
    """``tp2``, ``tp4 pp2``, ``tp4 dcp2``: the sizes that are not one, and always tp."""
    parts = [f"tp{engine.tp}"]
    if engine.pp > 1:
        parts.append(f"pp{engine.pp}")
    if engine.dcp > 1:
        parts.append(f"dcp{engine.dcp}")
    return " ".join(parts)
