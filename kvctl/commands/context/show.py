"""`kvctl context show`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl.cli.settings import Settings
from kvctl.errors import UsageError
from kvctl.fleet import contexts
from kvctl.views.output import show as shown
from kvctl.views.setting_up.context import context_document

SECTION = "Commands"
EXAMPLES = (
    "kvctl context show  # the one in use",
    "kvctl context show prod -o json | jq -r .hosts[]",
)


def show(
    settings: Settings,
    *,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The context. [the one in use]")
    ] = None,
) -> None:
    """One context: its hosts and its keys."""
    used = settings.context or contexts.in_use()
    wanted = name or used
    if not wanted:
        raise UsageError("no context is in use", "kvctl context list has the names: name one")
    shown(context_document(wanted, contexts.named(wanted), used), settings)
