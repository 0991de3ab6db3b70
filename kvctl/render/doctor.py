"""Draws the Doctor document: a line for each check, below it what to do."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from kvctl.views.doctor import Check, Doctor
from kvctl.views.table import column_table

STYLES = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}


def doctor_screen(body: Doctor, wide: bool) -> RenderableType:
    """All checks, then what to do about those that are not well; codes when wide."""
    rows: list[list[str | Text]] = [
        [check.about, Text(check.state, STYLES[check.state]), *([name(check)] if wide else []), check.found]
        for check in body.checks
    ]
    parts: list[RenderableType] = [
        column_table(["ABOUT", "STATE", *(["CODE"] if wide else []), "NOTE"], rows),
        "",
    ]
    parts += [
        Text.assemble((f"{check.state}  ", STYLES[check.state]), f"{name(check)}: {check.hint}")
        for check in body.checks
        if check.hint and (check.state in ("warning", "failed") or wide)
    ]
    return Group(*parts, _summary(body))


def name(check: Check) -> str:
    """The code, and the reason where there is one."""
    return f"{check.code} ({check.reason})" if check.reason else check.code


def _summary(body: Doctor) -> Text:
    if not body.failed and not body.warnings:
        return Text(f"nothing is wrong in {len(body.checks)} checks", "green")
    return Text(
        f"{len(body.checks)} checks: {body.failed} failed, {body.warnings} warn",
        "red" if body.failed else "yellow",
    )
