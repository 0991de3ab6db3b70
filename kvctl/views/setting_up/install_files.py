"""The InstalledFiles document: what `kvctl install-files` prints."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath
from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvctl.views.registry import View
from kvctl.views.screen import Column, ScreenPart, Styled, number, table


class InstalledFile(Struct, frozen=True, kw_only=True):
    """One file, and what became of it."""

    path: str
    state: Annotated[
        Literal["made", "replaced", "unchanged", "left"],
        Meta(description="as it is now, or in a dry run as it would be"),
    ]
    reason: Annotated[str, Meta(description="why it was left alone")] = ""


class InstalledFiles(Struct, frozen=True, kw_only=True):
    """Files of the host that come with kvctl and kvd: unit, man pages, completions, documentation."""

    prefix: str
    dry_run: bool
    files: tuple[InstalledFile, ...]


def installed_files_screen(body: InstalledFiles, wide: bool) -> ScreenPart:
    """Folder by folder, when wide file by file; what was left alone always."""
    left = [
        (Styled("left alone  ", "yellow"), f"{one.path}: {one.reason}")
        for one in body.files
        if one.state == "left"
    ]
    if wide:
        rows: ScreenPart = table(
            body.files, Column("STATE", lambda one: one.state), Column("FILE", lambda one: one.path)
        )
    else:
        counts = Counter((str(PurePath(one.path).parent), one.state) for one in body.files)
        rows = table(
            counts.items(),
            Column("FOLDER", lambda row: row[0][0]),
            Column("STATE", lambda row: row[0][1]),
            number("FILES", lambda row: row[1]),
        )
    last = [Styled("nothing was changed: --dry-run", "yellow")] if body.dry_run else []
    return [rows, *left, *last]


VIEWS = (View(InstalledFiles, installed_files_screen, "files", InstalledFile),)
