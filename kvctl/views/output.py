"""Puts a document on stdout in the form that was asked for, once or again and again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from kvctl.cli.settings import DRAWINGS, Settings
from kvctl.cli.talk import plain_lines
from kvctl.views.registry import lines, view_of, wrapped
from kvd.shown import has_controls, in_json

Body = TypeVar("Body", bound=msgspec.Struct)


def show(body: msgspec.Struct, settings: Settings) -> None:
    """Write a document to stdout and flush it."""
    sys.stdout.write(text_of(body, settings))
    sys.stdout.flush()


def show_repeatedly(fetch: Callable[[], Body], settings: Settings, every: float | None) -> Body:
    """Show what ``fetch`` returns, and return it; with ``every`` (seconds), again until interrupted.

    A terminal's screen is cleared each time; anywhere else the answers follow each other, tables with an empty line
    between. The answer is fetched before the old one is cleared away, so that a daemon that is gone leaves the last one
    standing.
    """
    redrawn = every is not None and settings.output in ("table", "wide")
    gap = ""
    while True:
        body = fetch()
        if redrawn:
            sys.stdout.write("\x1b[H\x1b[2J" if sys.stdout.isatty() else gap)
        show(body, settings)
        if every is None:
            return body
        gap = "\n"
        time.sleep(every)


def text_of(body: msgspec.Struct, settings: Settings) -> str:
    """The document as text that ends in a newline (or is empty: a list without items, as JSON lines)."""
    if settings.output == "jsonl":
        return "".join(in_json(msgspec.json.encode(line).decode()) + "\n" for line in lines(body))
    if settings.output in ("json", "yaml"):
        return plain_text(wrapped(body), settings)
    view = view_of(body)
    if settings.output in DRAWINGS:
        return plain_lines(view.drawings[settings.output](body))
    if view.screen is None:
        raise TypeError(f"{view.struct.__name__} has no screen")
    from kvctl.views.drawing import drawn

    return drawn(view.screen(body, settings.output == "wide"), settings)


def plain_text(document: dict[str, Any], settings: Settings) -> str:
    """Plain values as YAML, as JSON in one line (jsonl), or as indented JSON."""
    if settings.output == "yaml":
        import yaml

        def dumped(*, as_typed: bool) -> str:
            return yaml.safe_dump(document, sort_keys=False, allow_unicode=as_typed, default_flow_style=False)

        text = dumped(as_typed=True)
        return "---\n" + (dumped(as_typed=False) if has_controls(text.replace("\n", "")) else text)
    encoded = msgspec.json.encode(document)
    shown = encoded if settings.output == "jsonl" else msgspec.json.format(encoded, indent=2)
    return in_json(shown.decode()) + "\n"
