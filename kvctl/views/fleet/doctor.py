"""The FleetDoctor document: what `kvctl doctor --fleet` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta

from kvctl.cli.units import Count, filled
from kvctl.views.doctor import STYLES, Check, name
from kvctl.views.fleet.unanswered import HOST, FleetOf, unanswered_screen
from kvctl.views.folded.rows import folded
from kvctl.views.registry import View
from kvctl.views.screen import Column, ScreenPart, Styled, names, table

ORDER = ("failed", "warning", "skipped", "ok")


class FleetCheck(Check, frozen=True, kw_only=True):
    """One thing that was looked at on one host."""

    host: Annotated[str, Meta(description="host:port of the kvd that told of it")]


class FleetDoctor(FleetOf, frozen=True, kw_only=True):
    """What is wrong on all known hosts, as far as their kvds can tell."""

    failed: Annotated[Count, Meta(description="checks that failed")]
    warnings: Annotated[Count, Meta(description="checks that warn")]
    checks: tuple[FleetCheck, ...]


def fleet_doctor_checks(checks: Mapping[str, Sequence[Check]]) -> dict[str, Any]:
    """The fields of `FleetDoctor` that are not those of every fleet, the worst checks first."""
    every = [filled(FleetCheck, check, host=host) for host, found in checks.items() for check in found]
    return {
        "failed": sum(check.state == "failed" for check in every),
        "warnings": sum(check.state == "warning" for check in every),
        "checks": tuple(sorted(every, key=lambda check: (ORDER.index(check.state), check.code))),
    }


def fleet_doctor_screen(body: FleetDoctor, wide: bool) -> ScreenPart:
    """What is not well, hosts of which the same is said in one row, and what to do; with ``wide`` all checks."""
    bad = [check for check in body.checks if check.state in ("failed", "warning")]
    shown = body.checks if wide else bad
    columns: tuple[Column[Any], ...] = (
        HOST,
        Column("STATE", lambda check: Styled(check.state, STYLES[check.state])),
        Column("CODE", name),
        names("NOTE", lambda check: check.found),
    )
    made = table(shown, *columns) if wide else folded(shown, *columns)
    parts: list[ScreenPart] = [made, ""] if shown else []
    hints = {(name(check), check.hint): check for check in bad if check.hint}
    parts += [
        (Styled(f"{check.state}  ", STYLES[check.state]), f"{code}: {hint}")
        for (code, hint), check in hints.items()
    ]
    return [*parts, _summary(body, bad), *unanswered_screen(body.unanswered)]


def _summary(body: FleetDoctor, bad: Sequence[FleetCheck]) -> Styled:
    answered = body.hosts - len(body.unanswered)
    if not bad:
        return Styled(f"nothing is wrong on {answered} hosts in {len(body.checks)} checks", "green")
    well = answered - len({check.host for check in bad})
    return Styled(
        f"{answered} hosts, {well} of them well: {body.failed} checks failed, {body.warnings} warn",
        "red" if body.failed else "yellow",
    )


VIEWS = (View(FleetDoctor, fleet_doctor_screen, "checks", FleetCheck),)
