"""The file of --report: looked at before the work, written after it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvctl.errors import UsageError

ReportOption = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", dir_okay=False, help="Write a page of HTML as well."),
]


def check_report(path: Path | None) -> None:
    """Raise `UsageError` where the report could not be written in the end."""
    if path is not None and not os.access(path.absolute().parent, os.W_OK):
        raise UsageError(f"--report {path}: {path.absolute().parent} is no folder that can be written to")


def write_report(path: Path, page: str) -> None:
    """Write a page. Raises `UsageError` where that cannot be done."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--report {path}: {error.strerror or error}", "give another file") from None
