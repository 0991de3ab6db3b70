"""Shows a document once, or again and again until Ctrl-C."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvctl.cli.settings import Settings
from kvctl.views import output

Body = TypeVar("Body", bound=msgspec.Struct)


def show_repeatedly(fetch: Callable[[], Body], settings: Settings, every: float | None) -> Body:
    """Show what ``fetch`` returns, and return it; with ``every`` (seconds), again until interrupted.

    A terminal's screen is cleared each time; anywhere else the answers follow each other, tables with an empty line
    between. The answer is fetched before the old one is cleared away, so that a daemon that is gone leaves the last one
    standing.
    """
    body = fetch()
    first = True
    while True:
        if (
            every is not None
            and not output.clear(settings)
            and not first
            and settings.output in ("table", "wide")
        ):
            sys.stdout.write("\n")
        output.show(body, settings)
        if every is None:
            return body
        first = False
        time.sleep(every)
        body = fetch()
