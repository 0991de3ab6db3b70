"""The Doctor document: what `kvctl doctor` prints."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvctl.views.registry import View
from kvctl.views.screen import Cell, Column, ScreenPart, Styled, table

About = Literal["kvd", "engines", "transfers", "host", "backends", "peer"]
CheckState = Literal["ok", "warning", "failed", "skipped"]


class Check(Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    code: Annotated[str, Meta(description="stable")]
    about: Annotated[About, Meta(description="part")]
    state: Annotated[
        CheckState,
        Meta(description="failed: transfers do not work; warning: they work, and something is worth doing"),
    ]
    reason: Annotated[str, Meta(description="stable; where a code has several reasons")] = ""
    found: str
    hint: Annotated[str, Meta(description="what to do; empty where nothing is")] = ""


class Doctor(Struct, frozen=True, kw_only=True):
    """What is wrong with this host, its kvd and the transfers of its engines."""

    failed: Annotated[int, Meta(ge=0, description="checks that failed")]
    warnings: Annotated[int, Meta(ge=0, description="checks that warn")]
    checks: tuple[Check, ...]


def doctor_document(checks: list[Check]) -> Doctor:
    """The document of all checks, in their order."""
    states = [check.state for check in checks]
    return Doctor(failed=states.count("failed"), warnings=states.count("warning"), checks=tuple(checks))


STYLES = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}


def doctor_screen(body: Doctor, wide: bool) -> ScreenPart:
    """All checks, then what to do about those that are not well; codes when wide."""
    parts: list[ScreenPart] = [
        table(
            body.checks,
            Column("ABOUT", lambda check: check.about),
            Column("STATE", lambda check: Styled(check.state, STYLES[check.state])),
            Column("CODE", name, wide),
            Column("NOTE", lambda check: check.found),
        ),
        "",
    ]
    parts += [
        (Styled(f"{state}  ", STYLES[state]), f"{code}: {hint}")
        for state, code, hint in dict.fromkeys(  # once, however many checks it is for
            (check.state, name(check), check.hint) for check in body.checks
        )
        if hint and (state in ("warning", "failed") or wide)
    ]
    return [*parts, _summary(body)]


def name(check: Check) -> str:
    """The code, and the reason where there is one."""
    return f"{check.code} ({check.reason})" if check.reason else check.code


def _summary(body: Doctor) -> Cell:
    if not body.failed and not body.warnings:
        return Styled(f"nothing is wrong in {len(body.checks)} checks", "green")
    found = [f"{body.failed} failed"] * bool(body.failed) + [f"{body.warnings} warn"] * bool(body.warnings)
    return Styled(f"{len(body.checks)} checks: {', '.join(found)}", "red" if body.failed else "yellow")


VIEWS = (View(Doctor, doctor_screen, "checks", Check),)
