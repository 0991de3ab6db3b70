"""The Wait document: what `kvctl wait` prints."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvctl.cli.numbers import span
from kvctl.cli.units import Seconds
from kvctl.views.registry import View
from kvctl.views.screen import ScreenPart, Styled


class Awaited(Struct, frozen=True, kw_only=True):
    """One thing that was waited for."""

    target: Annotated[str, Meta(description="kvd or engine/ID")]
    state: str
    seconds: Annotated[Seconds, Meta(description="after which it was as wanted")]


class Wait(Struct, frozen=True, kw_only=True):
    """What was waited for, all of it as wanted."""

    wanted: Annotated[str, Meta(description="ready or gone")]
    targets: tuple[Awaited, ...]


def wait_screen(body: Wait, _wide: bool) -> ScreenPart:
    """A line for each."""
    return [
        (f"{one.target} is ", Styled(one.state, "green"), f", after {span(one.seconds)}")
        for one in body.targets
    ]


VIEWS = (View(Wait, wait_screen, "targets", Awaited),)
