"""The Bundle document: what `kvctl bundle` wrote, and the manifest that lies in it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvctl.cli.numbers import size
from kvctl.cli.units import Bytes, Time
from kvctl.views.registry import View
from kvctl.views.screen import Column, ScreenPart, number, table


class Bundled(Struct, frozen=True, kw_only=True):
    """One file of the bundle."""

    name: str
    what: str
    bytes: Bytes
    sha256: Annotated[str, Meta(description="empty where it was left out")]
    left_out: Annotated[str, Meta(description="why; empty where it is there")]


class Bundle(Struct, frozen=True, kw_only=True):
    """What was gathered of a host for somebody who is to find out what is wrong there."""

    file: str
    made: Time
    host: str
    kvctl: Annotated[str, Meta(description="version")]
    has_not: Annotated[str, Meta(description="what is never in a bundle")]
    has: Annotated[str, Meta(description="what to know before it is given away")]
    members: tuple[Bundled, ...]


def bundle_screen(body: Bundle, wide: bool) -> ScreenPart:
    """One file a line; sums when wide."""
    return [
        table(
            body.members,
            Column("FILE", lambda one: one.name),
            number("SIZE", lambda one: size(one.bytes) if not one.left_out else "-"),
            Column("SHA256", lambda one: one.sha256 or "-", wide),
            Column("NOTE", lambda one: f"left out: {one.left_out}" if one.left_out else one.what),
        ),
        "",
        f"{body.file}: it has {body.has}, and no {body.has_not}",
    ]


VIEWS = (View(Bundle, bundle_screen, "members", Bundled),)
