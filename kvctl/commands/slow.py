"""`kvctl slow`."""

from __future__ import annotations

from typing import Annotated

from kvctl import daemon
from kvctl.cli.options import FleetOption, WatchOption
from kvctl.cli.settings import Settings
from kvctl.errors import UsageError
from kvctl.ledger.known import refuse_unknown
from kvctl.ledger.options import (
    BackendOption,
    EngineOption,
    FromOption,
    PeerOption,
    SinceOption,
    last_option,
    question,
)
from kvctl.ledger.rows import rows
from kvctl.views.fleet.slow import FleetSlow, fleet_slow
from kvctl.views.fleet.unanswered import asked as of_fleet
from kvctl.views.fleet.unanswered import show_fleet
from kvctl.views.output import show_repeatedly
from kvctl.views.slow import Slow, slow_document

SECTION = "Look"
EXAMPLES = (
    "kvctl slow --since 10m",
    "kvctl slow --engine decode-0 --peer prefill-1 -o wide",
    "kvctl slow --from incident.trace",
)
LAST, LAST_OF_EACH = 10_000, 1000


def slow(  # noqa: PLR0913 (options)
    settings: Settings,
    *,
    since: SinceOption = None,
    engine: EngineOption = "",
    peer: PeerOption = "",
    backend: BackendOption = "",
    last: Annotated[
        int | None,
        last_option(f"Look at so many, the newest ones. [{LAST}; with --fleet {LAST_OF_EACH} of each host]"),
    ] = None,
    source: FromOption = "",
    fleet: FleetOption = False,
    watch: WatchOption = None,
) -> None:
    """What transfers spend their time on, and what to do about it.

    One line for each pair of engines and backend; SPENT ON says which part of all their time each stage took. Below
    stands what is worth doing, worst first: kvctl explain CODE says more of each. Exit code 0 also where there is
    something, 2 where --engine or --peer names an engine that nobody knows, unless it is waited for with --watch. With
    --fleet of all known hosts; exit code 4 where some did not answer.
    """
    if fleet and source:
        raise UsageError("--fleet asks hosts, and --from names a trace", "leave one of them out")
    asked = question(engine=engine, peer=peer, backend=backend, since=since)

    def fetch() -> Slow:
        answer = rows(settings, asked, last or LAST, source)
        if not answer.rows and watch is None:
            refuse_unknown(settings, source, engine, peer)
        return slow_document(answer)

    def fetch_all() -> FleetSlow:
        found = daemon.fleet(settings, lambda one: slow_document(rows(one, asked, last or LAST_OF_EACH)))
        return fleet_slow(found.answers, of_fleet(found))

    if fleet:
        show_fleet(fetch_all, settings, watch)
    else:
        show_repeatedly(fetch, settings, watch)
