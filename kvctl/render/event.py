"""Draws one Event."""

from __future__ import annotations

from rich.text import Text

from kvctl.cli.numbers import clock
from kvctl.views.event import Event

_BAD = ("gone", "down", "expired", "refused", "miss", "lost")


def event_screen(body: Event, wide: bool) -> Text:
    """One line: time, what happened, to whom, the details; the sequence number in front when wide."""
    style = (
        "red"
        if body.event.endswith(_BAD)
        else "green"
        if body.event.endswith(("ready", "done", "up"))
        else ""
    )
    line = Text(no_wrap=True, overflow="ignore")
    if wide:
        line.append(f"{body.seq:>8}  ")
    line.append(f"{clock(body.time)}  ")
    line.append(f"{body.event:<18}", style=style)
    line.append(f"  {body.subject}")
    for name, value in body.detail.items():
        line.append(f"  {name}={value}", style="dim")
    return line
