"""`kvctl slow`."""

from __future__ import annotations

from typing import Annotated

from kvctl.cli.options import Watch
from kvctl.cli.settings import Settings
from kvctl.ledger.known import refuse_unknown
from kvctl.ledger.options import Backend, Engine, From, Peer, Since, last_option, question
from kvctl.ledger.rows import rows
from kvctl.views.output import show_repeatedly
from kvctl.views.slow import Slow, slow_document

SECTION = "Look"
EXAMPLES = (
    "kvctl slow --since 10m",
    "kvctl slow --engine decode-0 --peer prefill-1 -o wide",
    "kvctl slow --from incident.trace",
)
LAST = 10_000


def slow(
    settings: Settings,
    *,
    since: Since = None,
    engine: Engine = "",
    peer: Peer = "",
    backend: Backend = "",
    last: Annotated[int | None, last_option(f"Look at so many, the newest ones. [{LAST}]")] = None,
    source: From = "",
    watch: Watch = None,
) -> None:
    """What transfers spend their time on, and what to do about it.

    One line for each pair of engines and backend; SPENT ON says which part of all their time each stage took. Below
    stands what is worth doing, worst first: kvctl explain CODE says more of each. Exit code 0 also where there is
    something, 2 where --engine or --peer names an engine that nobody knows, unless it is waited for with --watch.
    """
    asked = question(engine=engine, peer=peer, backend=backend, since=since)

    def fetch() -> Slow:
        answer = rows(settings, asked, last or LAST, source)
        if not answer.rows and watch is None:
            refuse_unknown(settings, source, engine, peer)
        return slow_document(answer)

    show_repeatedly(fetch, settings, watch)
