"""`kvctl transfers`."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from kvctl.cli.options import Watch
from kvctl.cli.parsing import one_of
from kvctl.cli.settings import Settings
from kvctl.ledger.options import (
    Backend,
    Code,
    Engine,
    From,
    Peer,
    Request,
    Since,
    SlowerThan,
    State,
    last_option,
    question,
)
from kvctl.ledger.rows import rows
from kvctl.views.output import show_repeatedly
from kvctl.views.transfers.document import Transfers, transfer_document
from kvctl.views.transfers.groups import GROUPINGS, TransferGroups, grouped

SECTION = "Look"
SORTS = ("newest", "slowest", "largest")
LAST, LAST_GROUPED = 20, 10_000


def transfers(  # noqa: PLR0913 (options)
    settings: Settings,
    *,
    last: Annotated[
        int | None, last_option(f"At most so many. [{LAST}; with --by the newest {LAST_GROUPED}]")
    ] = None,
    engine: Engine = "",
    peer: Peer = "",
    request: Request = "",
    state: State = None,
    code: Code = None,
    backend: Backend = "",
    since: Since = None,
    slower_than: SlowerThan = None,
    sort: Annotated[
        str, typer.Option("--sort", metavar="|".join(SORTS), parser=one_of(*SORTS), help="Which come first.")
    ] = "newest",
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            metavar="|".join(GROUPINGS),
            parser=one_of(*GROUPINGS),
            help="Count them together, one line for each.",
        ),
    ] = None,
    source: From = "",
    watch: Watch = None,
) -> None:
    """The newest KV transfers in kvd's ledger.

    TIME is from the scheduler's claim to the report, RATE that of the bytes on the wire. With -o jsonl --watch each
    transfer is printed once, as it comes.
    """
    asked = msgspec.structs.replace(
        question(
            engine=engine,
            peer=peer,
            request=request,
            state=state,
            code=code,
            backend=backend,
            since=since,
            slower_than=slower_than,
        ),
        order=sort,
    )
    wanted = last or (LAST_GROUPED if by else LAST)
    seen = 0

    def fetch() -> Transfers | TransferGroups:
        nonlocal seen
        follow = watch is not None and settings.output == "jsonl" and not by
        since_then = msgspec.structs.replace(asked, after=seen if follow else 0)
        answer = rows(settings, since_then, LAST_GROUPED if follow and seen else wanted, source)
        if by:
            return grouped(answer, by)
        found = answer.rows
        if follow:
            # Lines that follow each other read best in the order of events.
            found = tuple(reversed(found))
            seen = max((seen, *(row.seq for row in found)))
        return Transfers(total=answer.total, transfers=tuple(transfer_document(row) for row in found))

    show_repeatedly(fetch, settings, watch)
