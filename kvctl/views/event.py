"""The Event document: one line of `kvctl events`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvctl.cli.numbers import clock
from kvctl.cli.units import Scalar, Time
from kvctl.views.registry import View, moment
from kvctl.views.screen import ScreenPart, Styled
from kvd.wire import event as wire


class Event(Struct, frozen=True, kw_only=True):
    """Something that happened."""

    seq: Annotated[int, Meta(description="without gaps, so that a reader sees what it missed")]
    time: Time
    event: Annotated[str, Meta(description="dotted: engine.ready, worker.gone, transfer.miss ...")]
    subject: str
    detail: dict[str, Scalar]


def event_document(event: wire.KvdEvent) -> Event:
    """The document of one published event."""
    return Event(
        seq=event.seq, time=moment(event.time), event=event.kind, subject=event.subject, detail=event.detail
    )


_BAD = ("gone", "down", "expired", "refused", "miss", "lost")


def event_screen(body: Event, wide: bool) -> ScreenPart:
    """One line: time, what happened, to whom, the details; the sequence number in front when wide."""
    bad, good = body.event.endswith(_BAD), body.event.endswith(("ready", "done", "up"))
    style = "red" if bad else "green" if good else ""
    return (
        f"{body.seq:>8}  " * wide + f"{clock(body.time)}  ",
        Styled(f"{body.event:<18}", style),
        f"  {body.subject}",
        *(Styled(f"  {name}={value}", "dim") for name, value in body.detail.items()),
    )


VIEWS = (View(Event, event_screen),)
