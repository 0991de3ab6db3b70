"""`kvctl engines`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl import daemon
from kvctl.cli.option_kinds import choice
from kvctl.cli.options import ListSettings, Watch
from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.views.engines import Engines, engine_document
from kvctl.views.output import show_repeatedly
from kvd.wire.outcomes import GetOutcomes, OutcomeCount

SECTION = "Look"
EXAMPLES = (
    "kvctl engines -w  # drawn anew every 2 s",
    "kvctl engines --state partial",
    "kvctl engines -o name | xargs -n1 kvctl transfers --engine",
)
STATES = ("ready", "partial", "gone", "unreachable")


def engines(
    settings: ListSettings,
    *,
    state: Annotated[str | None, choice("--state", STATES, help="Only engines in this state.")] = None,
    local: Annotated[bool, typer.Option("--local", help="Only engines of this host.")] = False,
    watch: Watch = None,
) -> None:
    """The engines that kvd knows, local ones and peers'.

    With -o wide also generation, place, policy, open leases, what became of the prompts of the last minute's requests,
    and the engines whose handshake is done.
    """

    def fetch() -> Engines:
        rows = daemon.engines(settings)
        if unseen := sum(row.hidden for row in rows):
            names = "engines of other users with their names and states alone"
            say(daemon.hidden(unseen, names))
        shown = [row for row in rows if (state is None or row.state == state) and (row.local or not local)]
        if not shown and watch is None:
            wanted = " and ".join(filter(None, (state, "local" * local)))
            say(
                f"none of the {len(rows)} engines that kvd knows is {wanted}"
                if rows
                else "kvd knows no engine; kvctl doctor says what an engine needs"
            )
        served = {} if settings.output == "table" else _served(settings)
        return Engines(
            engines=tuple(
                engine_document(row, served.get(row.engine.engine_id, ()) if row.local else ())
                for row in shown
            )
        )

    show_repeatedly(fetch, settings, watch)


def _served(settings: Settings) -> dict[str, tuple[OutcomeCount, ...]]:
    return {row.engine_id: row.lately for row in daemon.outcomes(settings, GetOutcomes())}
