"""A report's page: what it is, who made it, when, with what and how, what was found, and the parts below."""

from __future__ import annotations

import os
import platform
import pwd
import shlex
import socket
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import NamedTuple

from kvctl.cli.numbers import span
from kvctl.views.screen import TextTable
from kvd.backends.registry import ADAPTERS
from kvd.installed import installed_version, own_version
from kvd.shown import escaped

PageFact = tuple[str, str]
"""What something is called, and what it is."""


class Section(NamedTuple):
    """A part of a page: its heading, and HTML in which all that others chose went through `plain`."""

    heading: str
    html: str


def plain(text: object) -> str:
    """Text as HTML; whatever control characters an id holds are written out."""
    return escape(escaped(str(text)))


def page(title: str, facts: Iterable[PageFact], found: Iterable[str], sections: Iterable[Section]) -> str:
    """The whole page."""
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    known = "".join(f"<dt>{plain(name)}</dt><dd>{plain(value)}</dd>\n" for name, value in facts)
    told = "".join(f"<p>{plain(text)}</p>\n" for text in found)
    parts = "".join(f"<h2>{plain(one.heading)}</h2>\n{one.html}\n" for one in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{plain(title)}</title>\n<style>\n{style}</style></head>\n"
        f'<body><h1>{plain(title)}</h1>\n<dl class="facts">\n{known}</dl>\n{told}{parts}</body></html>\n'
    )


def origin(started: datetime, seconds: float | None = None) -> list[PageFact]:
    """Who made a report, when, with what, and by which command."""
    took = "" if seconds is None else f", in {span(seconds)}"
    engines = {
        name: installed_version(one.distributions, "") for name, one in ADAPTERS.items() if one.distributions
    }
    versions = {"kvctl": own_version(), "Python": platform.python_version(), **engines}
    return [
        ("Made", f"{utc(started)}{took}, by {_user()} on {socket.gethostname()} ({platform.platform()})"),
        ("With", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
        ("Command", shlex.join(["kvctl", *sys.argv[1:]])),
    ]


def utc(moment: datetime) -> str:
    """A moment as a reader in another zone can use it."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def table_html(table: TextTable) -> str:
    """A table; where there is no room for its columns, each cell stands behind its header."""
    head = "".join(f"<th>{plain(header)}</th>" for header in table.headers)
    lines = "".join(f"<tr>{_cells(table.headers, row)}</tr>\n" for row in table.rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{lines}</tbody></table>"


def _cells(headers: Sequence[str], row: Sequence[object]) -> str:
    return "".join(
        f'<td data-header="{plain(header)}">{plain(cell)}</td>'
        for header, cell in zip(headers, row, strict=True)
    )


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container often has no entry
        return f"uid {os.geteuid()}"
