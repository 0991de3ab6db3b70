"""Puts a document on stdout in the form that was asked for, once or again and again."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from kvctl.cli import numbers
from kvctl.cli.settings import TABLES, Settings
from kvctl.cli.talk import plain_lines
from kvctl.views.folded.rows import settled
from kvctl.views.registry import lines, view_of, wrapped
from kvctl.views.screen import ScreenPart, marked
from kvd.shown import has_controls, in_json

Body = TypeVar("Body", bound=msgspec.Struct)


def show(body: msgspec.Struct, settings: Settings) -> None:
    """Write a document to stdout and flush it."""
    sys.stdout.write(text_of(body, settings))
    sys.stdout.flush()


def show_repeatedly(fetch: Callable[[], Body], settings: Settings, every: float | None) -> Body:
    """Show what ``fetch`` returns, and return it; with ``every`` (seconds), again until interrupted.

    On a terminal a table is drawn over the one before, with what changed marked. Anywhere else tables follow each other
    as pages that begin with the time. The answer is fetched before the old one is drawn over, so that a daemon that is
    gone leaves the last one standing.
    """
    before: ScreenPart | None = None
    while True:
        body = fetch()
        if every is None:
            show(body, settings)
            return body
        if settings.output in TABLES:
            now = _screen(body, settings)
            sys.stdout.write(
                _over(now, before, settings) if sys.stdout.isatty() else _page(now, before, settings)
            )
            sys.stdout.flush()
            before = now
        else:
            show(body, settings)
        time.sleep(every)


def _over(now: ScreenPart, before: ScreenPart | None, settings: Settings) -> str:
    """What draws one screen over the other without a flicker; as many lines as the terminal has."""
    from kvctl.views.drawing import drawn

    lines = drawn(now if before is None else marked(now, before), settings).splitlines()
    room = shutil.get_terminal_size().lines - 1
    if len(lines) > room:
        lines = [
            *lines[: room - 1],
            f"... {len(lines) - room + 1} more lines: narrow it down, or make the terminal taller",
        ]
    clear = "\x1b[2J" if before is None else ""
    return "\x1b[H" + clear + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J"


def _page(now: ScreenPart, before: ScreenPart | None, settings: Settings) -> str:
    from kvctl.views.drawing import drawn

    moment = numbers.now().astimezone().isoformat(timespec="seconds")
    return ("" if before is None else "\n") + f"{moment}\n{drawn(now, settings)}"


def _screen(body: msgspec.Struct, settings: Settings) -> ScreenPart:
    view = view_of(body)
    if view.screen is None:
        raise TypeError(f"{view.struct.__name__} has no screen")
    by_itself = settings.output == "table" and sys.stdout.isatty()
    return settled(
        view.screen(body, settings.output == "wide"), always=settings.output == "folded", by_itself=by_itself
    )


def text_of(body: msgspec.Struct, settings: Settings) -> str:
    """The document as text that ends in a newline (or is empty: a list without items, as JSON lines)."""
    if settings.output == "jsonl":
        return "".join(in_json(msgspec.json.encode(line).decode()) + "\n" for line in lines(body))
    if settings.output in ("json", "yaml"):
        return plain_text(wrapped(body), settings)
    view = view_of(body)
    if settings.output in view.drawings:
        return plain_lines(view.drawings[settings.output](body))
    from kvctl.views.drawing import drawn

    return drawn(_screen(body, settings), settings)


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
