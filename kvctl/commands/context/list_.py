"""`kvctl context list`."""

from __future__ import annotations

from kvctl.cli.options import ListSettings
from kvctl.cli.talk import say
from kvctl.fleet import contexts
from kvctl.views.output import show
from kvctl.views.setting_up.context import Contexts, context_document

SECTION = "Commands"
EXAMPLES = (
    "kvctl context list",
    "kvctl context list -o name",
)


def list_(settings: ListSettings) -> None:
    """All contexts, and which is in use."""
    found, used = contexts.contexts(), settings.context or contexts.in_use()
    if not found:
        say(f"{contexts.directory() / contexts.FILE} holds no context; write it as {contexts.EXAMPLE}")
    body = Contexts(contexts=tuple(context_document(name, found[name], used) for name in sorted(found)))
    show(body, settings)
