"""The Version document: what `kvctl version` prints."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvctl.views.registry import View
from kvctl.views.screen import ScreenPart, facts


class AnsweringKvd(Struct, frozen=True, kw_only=True):
    """The kvd that answered."""

    version: str
    kvd_id: str
    address: str


class Version(Struct, frozen=True, kw_only=True):
    """The versions of both sides."""

    kvctl: str
    python: str
    wire_version: Annotated[int, Meta(description="version of the wire that this kvctl speaks")]
    daemon: Annotated[AnsweringKvd | None, Meta(description="null when no kvd answered")]


def version_screen(body: Version, wide: bool) -> ScreenPart:
    """Both sides, one a line; the daemon's address when wide."""
    rows = [("kvctl", body.kvctl), ("python", body.python), ("wire", str(body.wire_version))]
    rows.append(("kvd", body.daemon.version if body.daemon else "no answer"))
    if wide and body.daemon:
        rows += [("kvd id", body.daemon.kvd_id), ("address", body.daemon.address)]
    return facts(*rows)


VIEWS = (View(Version, version_screen),)
