"""`kvctl context use`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.errors import UsageError
from kvctl.fleet import contexts
from kvctl.views.output import show
from kvctl.views.setting_up.context import context_document

SECTION = "Commands"
EXAMPLES = (
    "kvctl context use prod",
    "kvctl context use --none  # back to the kvd of this host",
)


def use(
    settings: Settings,
    *,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The context.")] = None,
    none: Annotated[bool, typer.Option("--none", help="Use no context, but this host's kvd.")] = False,
) -> None:
    """Have --fleet and --host go by a context from now on."""
    if (name is None) != none:
        raise UsageError("give NAME or --none, one of them", "kvctl context list has the names")
    contexts.use(name or "")
    if name:
        show(context_document(name, contexts.named(name), name), settings)
    else:
        say("--fleet and --host go by what this host's kvd knows")
