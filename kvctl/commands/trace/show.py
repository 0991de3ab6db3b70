"""`kvctl trace show`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl.cli.settings import Settings
from kvctl.views.output import show as show_document

SECTION = "Commands"
EXAMPLES = (
    "kvctl trace show  # the imported ones",
    "kvctl trace show incident.trace.zst",
)


def show(
    settings: Settings,
    *,
    trace: Annotated[
        str, typer.Argument(metavar="[TRACE]", help="A file, - for stdin, or an imported trace's name.")
    ] = "",
) -> None:
    """What a trace holds; without a name, which there are.

    All of it is read and checked: a trace that cannot be used is told with the line that is wrong, exit code 1.
    """
    from kvctl.ledger import trace_files
    from kvctl.views.trace import trace_document, traces_document
    from kvd.trace.errors import TraceError
    from kvd.trace.read import open_trace

    if not trace:
        show_document(traces_document(trace_files.kept()), settings)
        return
    path = trace_files.found(trace)
    try:
        with open_trace(path) as (head, transfers):
            body = trace_document(head, transfers, trace)
    except TraceError as error:
        raise trace_files.failed(error) from None
    show_document(body, settings)
