"""The Event document: one line of `kvctl events`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvctl.views.fields import Scalar, Time
from kvctl.views.registry import moment
from kvd.wire import event as wire


class Event(Struct, frozen=True, kw_only=True):
    """Something that happened."""

    seq: Annotated[int, Meta(description="without gaps, so that a reader sees what it missed")]
    time: Time
    event: Annotated[str, Meta(description="dotted: engine.ready, worker.gone, transfer.miss ...")]
    subject: str
    detail: dict[str, Scalar]


def event_document(event: wire.Event) -> Event:
    """The document of one published event."""
    return Event(
        seq=event.seq, time=moment(event.time), event=event.kind, subject=event.subject, detail=event.detail
    )
