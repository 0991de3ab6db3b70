"""`kvctl transfers`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl import daemon
from kvctl.documents.transfers import Transfers, transfer_document
from kvctl.options import Watch
from kvctl.parsing import count, one_of
from kvctl.settings import Settings
from kvctl.watch import show_repeatedly
from kvd.wire import transfer as wire

STATES = ("done", "miss")


def transfers(
    settings: Settings,
    *,
    limit: Annotated[
        int, typer.Option("--limit", "-n", metavar="N", parser=count, help="At most so many.")
    ] = 20,
    engine: Annotated[
        str, typer.Option("--engine", "-e", metavar="ENGINE", help="Only to or from this engine.")
    ] = "",
    request: Annotated[str, typer.Option("--request", "-r", metavar="ID", help="Only of this request.")] = "",
    state: Annotated[
        str | None,
        typer.Option(
            "--state", metavar="|".join(STATES), parser=one_of(*STATES), help="Only done, or misses."
        ),
    ] = None,
    watch: Watch = None,
) -> None:
    """The newest KV transfers in kvd's ledger.

    TIME is from the scheduler's claim to the report, RATE that of the bytes on the wire. With -o jsonl --watch each
    transfer is printed once, as it comes.
    """
    seen = 0

    def fetch() -> Transfers:
        nonlocal seen
        follow = watch is not None and settings.output == "jsonl"
        question = wire.ListTransfers(
            limit=limit, after=seen if follow else 0, request_id=request, engine_id=engine, state=state or ""
        )
        answer = daemon.ask(settings, question, wire.Transfers)
        rows = answer.rows
        if follow:
            # Lines that follow each other read best in the order of events.
            rows = tuple(reversed(rows))
            seen = max((seen, *(row.seq for row in rows)))
        return Transfers(total=answer.total, transfers=tuple(transfer_document(row) for row in rows))

    show_repeatedly(fetch, settings, watch)
