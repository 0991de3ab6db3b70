"""Hosts of a fleet that did not answer: in documents, on screens, and as an exit code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct

from kvctl.cli.settings import Settings
from kvctl.cli.units import Count
from kvctl.errors import HostsUnanswered
from kvctl.fleet.asking import FleetAnswers, NotAnswered
from kvctl.views.output import show_repeatedly
from kvctl.views.screen import Column, ScreenPart, Styled, names, table

HOST: Column[Any] = names("HOST", lambda one: one.host)
"""The column that says whose row it is."""
MOST_NAMED = 8
"""Hosts that the last line names; the document has all."""


class UnansweredHost(Struct, frozen=True, kw_only=True):
    """A host that did not answer."""

    host: str
    code: Annotated[str, Meta(description="what kvctl explain takes")]
    reason: str
    hint: Annotated[str, Meta(description="what to do about it; may be empty")]


class FleetOf(Struct, frozen=True, kw_only=True):
    """What documents of fleets begin with."""

    hosts: Annotated[Count, Meta(description="hosts that were asked")]
    unanswered: tuple[UnansweredHost, ...]


Body = TypeVar("Body", bound=FleetOf)


def asked(found: FleetAnswers[Any]) -> dict[str, Any]:
    """The fields of `FleetOf`."""
    return {
        "hosts": len(found.answers) + len(found.missing),
        "unanswered": tuple(_unanswered(one) for one in found.missing),
    }


def show_fleet(fetch: Callable[[], Body], settings: Settings, every: float | None) -> Body:
    """Show what ``fetch`` returns, as `show_repeatedly` does.

    Raises `HostsUnanswered` where some did not answer.
    """
    body = show_repeatedly(fetch, settings, every)
    if missing := body.unanswered:
        names = ", ".join(one.host for one in missing[:MOST_NAMED])
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        raise HostsUnanswered(
            f"{len(missing)} of {body.hosts} hosts did not answer: {names}{more}",
            (missing[0].hint if len(missing) == 1 else "")
            or f"kvctl --host {missing[0].host} status says more of one",
        )
    return body


def unanswered_screen(missing: Sequence[UnansweredHost]) -> list[ScreenPart]:
    """One host a line; nothing where all answered."""
    if not missing:
        return []
    return [
        "",
        table(
            missing,
            Column("NOT ANSWERED", lambda one: Styled(one.host, "yellow")),
            Column("REASON", lambda one: f"{one.reason} [{one.code}]"),
        ),
    ]


def _unanswered(one: NotAnswered) -> UnansweredHost:
    return UnansweredHost(host=one.host, code=one.error.code, reason=one.error.message, hint=one.error.hint)
