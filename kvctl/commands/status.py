"""`kvctl status`."""

from __future__ import annotations

from kvctl import daemon
from kvctl.cli.options import Watch
from kvctl.cli.settings import Settings
from kvctl.views.status import Status, status_document
from kvctl.views.watch import show_repeatedly
from kvd.wire import query


def status(settings: Settings, *, watch: Watch = None) -> None:
    """How this host's kvd is: peers, counters, gauges.

    Counters that stand at zero are shown with -o wide.
    """

    def fetch() -> Status:
        return status_document(daemon.ask(settings, query.GetStatus(), query.Status))

    show_repeatedly(fetch, settings, watch)
