"""Draws the Version document."""

from __future__ import annotations

from rich.console import RenderableType

from kvctl.views.table import pairs_table
from kvctl.views.version import Version


def version_screen(body: Version, wide: bool) -> RenderableType:
    """Both sides, one a line; the daemon's address when wide."""
    rows = [("kvctl", body.kvctl), ("python", body.python), ("wire", str(body.wire_version))]
    rows.append(("kvd", body.daemon.version if body.daemon else "no answer"))
    if wide and body.daemon:
        rows += [("kvd id", body.daemon.kvd_id), ("address", body.daemon.address)]
    return pairs_table(rows)
