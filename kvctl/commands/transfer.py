"""`kvctl transfer`."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from kvctl.cli.settings import Settings
from kvctl.errors import UsageError
from kvctl.ledger.options import FromOption
from kvctl.ledger.rows import rows
from kvctl.views.output import show
from kvctl.views.transfers.whole import WholeTransfer, whole_transfer
from kvd.wire.transfer import ListTransfers

SECTION = "Look"
EXAMPLES = (
    "kvctl transfer cmpl-2",
    "kvctl transfer cmpl-2 -o wide  # with each part's blocks",
)
MOST_WORKERS = 4096


def transfer(
    settings: Settings,
    *,
    which: Annotated[
        str, typer.Argument(metavar="ID", help="Of a request on either side, of a transfer, or a number.")
    ],
    source: FromOption = "",
) -> None:
    """One transfer whole: all workers' parts and when each did what.

    Of a request that was transferred more than once it is the newest. -o wide adds the blocks. Exit code 2 where
    there is none of that id.
    """
    show(whole(settings, which, source), settings)


def whole(settings: Settings, which: str, source: str = "") -> WholeTransfer:
    """The newest transfer that the id names, with the parts of all workers. Raises `KvctlError`."""
    if not which:
        raise UsageError("ID is empty", "kvctl transfers -o wide lists ids")
    asked = ListTransfers(any_id=which, blocks=True)
    answer = rows(settings, asked, 1, source)
    found = answer.rows
    if not found:
        whose = " of your own engines" if answer.hidden else ""
        raise UsageError(
            f"no transfer {which!r}{whose} in {source or 'the ledger'}",
            f"kvctl transfers --filter 'request={which}*' lists ids that begin so; old transfers are dropped, and a"
            " request that was computed has none",
        )
    newest = found[0]  # a kvd of another host may answer with more than was asked for
    record = newest.record
    same = msgspec.structs.replace(
        asked,
        any_id="",
        request_id=record.request_id,
        engine_id=record.local_engine,
        peer=record.remote_engine,
    )
    return whole_transfer(newest, rows(settings, same, MOST_WORKERS, source).rows)
