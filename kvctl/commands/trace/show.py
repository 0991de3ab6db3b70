"""`kvctl trace show`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from kvctl.cli.report_file import ReportOption, check_report, write_report
from kvctl.cli.settings import Settings
from kvctl.errors import UsageError
from kvctl.views.output import show as show_document

SECTION = "Commands"
EXAMPLES = (
    "kvctl trace show  # the imported ones",
    "kvctl trace show incident.trace.zst --report incident.html",
)


def show(
    settings: Settings,
    *,
    trace: Annotated[
        str, typer.Argument(metavar="[TRACE]", help="A file, - for stdin, or an imported trace's name.")
    ] = "",
    report: ReportOption = None,
) -> None:
    """What a trace holds; without a name, which there are.

    The page of --report has its transfers on a time axis, the worst of them first.

    All of it is read and checked: a trace that cannot be used is told with the line that is wrong, exit code 1.
    """
    from kvctl.ledger import trace_files
    from kvctl.views.trace import trace_document, traces_document
    from kvd.trace.errors import TraceError
    from kvd.trace.read import open_trace

    if not trace:
        if report is not None:
            raise UsageError("--report is of one trace, and none is named", "kvctl trace show lists them")
        show_document(traces_document(trace_files.kept()), settings)
        return
    check_report(report)
    path = trace_files.found(trace)
    try:
        with open_trace(path) as (head, transfers):
            whole = replace(head, transfers=tuple(transfers)) if report else head
            body = trace_document(head, whole.transfers if report else transfers, trace)
    except TraceError as error:
        raise trace_files.failed(error) from None
    show_document(body, settings)
    if report is not None:
        from kvctl.views.reports.trace import trace_page

        write_report(report, trace_page(body, whole))
