"""The Probe document: what `kvctl probe` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from kvctl.cli.numbers import span
from kvctl.cli.units import Count, Seconds
from kvctl.views.registry import View
from kvctl.views.screen import Cell, Column, ScreenPart, Styled, number, table
from kvd.errors import joined

if TYPE_CHECKING:
    from kvctl.engines.probing import ProbedListener


class Probe(Struct, frozen=True, kw_only=True):
    """Handshakes with a stock connector, one after the other."""

    address: str
    asked: Annotated[int, Meta(ge=1, description="questions that were to be asked")]
    answered: Count
    engines: Annotated[int, Meta(ge=0, description="different engines, or starts of one, that answered")]
    engine_ids: tuple[str, ...]
    median: Annotated[Seconds | None, Meta(description="of a handshake, in seconds; null without an answer")]
    p99: Annotated[Seconds | None, Meta(description="in seconds, the nearest rank; null without an answer")]
    longest: Annotated[Seconds | None, Meta(description="in seconds; null without an answer")]
    code: Annotated[str, Meta(description="why it ended early; empty where all were answered")]
    message: str
    hint: str


def probe_document(address: str, asked: int, found: ProbedListener) -> Probe:
    """The document of what was found."""
    took = sorted(found.seconds)

    def at(share: float) -> float | None:
        return took[min(len(took) - 1, int(share * len(took)))] if took else None

    error = found.error
    return Probe(
        address=address,
        asked=asked,
        answered=len(took),
        engines=len(found.engines),
        engine_ids=tuple(dict.fromkeys(name for name, _ in found.engines)),
        median=at(0.5),
        p99=at(0.99),
        longest=at(1),
        code=error.code if error else "",
        message=error.message if error else "",
        hint=error.hint if error else "",
    )


def probe_screen(body: Probe, _wide: bool) -> ScreenPart:
    """One row, then whether it serves on."""
    row = table(
        (body,),
        Column("ADDRESS", lambda b: b.address),
        Column("ENGINE", lambda b: ", ".join(b.engine_ids) or "-"),
        number("ANSWERED", lambda b: f"{b.answered}/{b.asked}"),
        number("MEDIAN", lambda b: _took(b.median)),
        number("P99", lambda b: _took(b.p99)),
        number("LONGEST", lambda b: _took(b.longest)),
    )
    return [row, "", _result(body)]


def _took(seconds: float | None) -> str:
    return "-" if seconds is None else span(seconds)


def _result(body: Probe) -> Cell:
    if body.code:
        return Styled(f"{body.code}: {joined(body.message, body.hint)}", "bold red")
    if body.engines > 1:
        said = "PEER_REINCARNATED: another engine answered than before: it was restarted, or two share one address"
        return Styled(said, "yellow")
    return Styled("it serves on", "green")


VIEWS = (View(Probe, probe_screen),)
