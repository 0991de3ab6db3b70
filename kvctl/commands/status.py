"""`kvctl status`."""

from __future__ import annotations

from kvctl import daemon
from kvctl.cli.options import Watch
from kvctl.cli.settings import Settings
from kvctl.views.output import show_repeatedly
from kvctl.views.status import Status, status_document
from kvd.wire import query

SECTION = "Look"
EXAMPLES = (
    "kvctl status -w",
    "kvctl status -o json | jq -r '.gauges | keys[]'",
)


def status(settings: Settings, *, watch: Watch = None) -> None:
    """How this host's kvd is: peers, counters, gauges.

    Counters that stand at zero are shown with -o wide.
    """

    def fetch() -> Status:
        return status_document(daemon.ask(settings, query.GetStatus(), query.KvdStatus))

    show_repeatedly(fetch, settings, watch)
