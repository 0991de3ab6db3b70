"""`kvctl status`."""

from __future__ import annotations

from typing import Annotated

from kvctl import daemon
from kvctl.cli.option_kinds import choice
from kvctl.cli.options import FleetOption, WatchOption
from kvctl.cli.settings import Settings
from kvctl.errors import UsageError
from kvctl.views.fleet.status import SORTS, FleetStatus, fleet_host
from kvctl.views.fleet.unanswered import asked, show_fleet
from kvctl.views.output import show_repeatedly
from kvctl.views.status import Status, status_document
from kvd.wire import query

SECTION = "Look"
EXAMPLES = (
    "kvctl status -w",
    "kvctl status -o json | jq -r '.gauges | keys[]'",
)


def status(
    settings: Settings,
    *,
    fleet: FleetOption = False,
    sort: Annotated[
        str | None, choice("--sort", SORTS, help="With --fleet: which come first. [host]")
    ] = None,
    watch: WatchOption = None,
) -> None:
    """How this host's kvd is: peers, counters, gauges.

    Counters that stand at zero are shown with -o wide. With --fleet it is a line for each known host; exit code 4 where
    some did not answer.
    """
    if sort and not fleet:
        raise UsageError("--sort is for --fleet", "leave it out: one kvd needs no order")

    def fetch() -> Status:
        return status_document(_asked(settings))

    def fetch_all() -> FleetStatus:
        found = daemon.fleet(settings, _asked)
        hosts = (fleet_host(host, one) for host, one in found.answers.items())
        return FleetStatus(kvds=tuple(sorted(hosts, key=SORTS[sort or "host"])), **asked(found))

    if fleet:
        show_fleet(fetch_all, settings, watch)
    else:
        show_repeatedly(fetch, settings, watch)


def _asked(settings: Settings) -> query.KvdStatus:
    return daemon.ask(settings, query.GetStatus(), query.KvdStatus)
