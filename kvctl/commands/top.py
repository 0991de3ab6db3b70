"""`kvctl top`."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Annotated

import typer

from kvctl import daemon
from kvctl.cli.settings import Settings
from kvctl.commands.transfer import whole
from kvctl.errors import UsageError
from kvctl.top.looking import look
from kvctl.views.output import show

SECTION = "Look"
EXAMPLES = (
    "kvctl top",
    "kvctl top --once -o json | jq -r '.in_flight[].request_id'",
)
PATIENCE = 2.0
"""Seconds that the full screen waits for an answer at most: what does not come is said, and asked for again."""


def top(
    settings: Settings,
    *,
    once: Annotated[
        bool, typer.Option("--once", help="Print one plain page, as where stdout is no terminal.")
    ] = False,
) -> None:
    """What moves now, full screen: engines, pairs, transfers in flight, misses.

    Keys: 1 to 5 or Tab choose a table, Enter shows one transfer's timeline, / filters, s sorts by the next column, r
    the other way round, p holds still, q ends. It asks kvd once a second, and goes on when a kvd that went away is
    back. In a pipe, with --once and with -o json it prints one page.
    """
    if once or not (sys.stdout.isatty() and sys.stdin.isatty()) or settings.output not in ("table", "wide"):
        show(look(settings).top, settings)
        return
    if find_spec("textual") is None:
        raise UsageError(
            "the full screen needs textual, which is not installed here",
            "pip install 'kvctl[top]', or kvctl top --once for one plain page",
        )
    daemon.where(settings)  # an address that is none is not worth waiting at
    from kvctl.top.app import Watched, watch

    patient = replace(settings, timeout=min(settings.timeout, PATIENCE))
    watch(
        Watched(look=partial(look, patient), whole=partial(whole, patient), where=daemon.where(settings)),
        color=settings.color != "never",
    )
