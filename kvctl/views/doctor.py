"""The Doctor document: what `kvctl doctor` prints."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class Check(Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    code: Annotated[str, Meta(description="stable")]
    about: Annotated[Literal["kvd", "engines", "transfers", "host", "backends"], Meta(description="part")]
    state: Annotated[
        Literal["ok", "warning", "failed", "skipped"],
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
