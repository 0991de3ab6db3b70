"""Rows of the ledger, from the running kvd or from a trace, page by page: as many as are wanted."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvctl import daemon
from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.ledger.statistics import ORDERS
from kvd.client.errors import ProtocolError
from kvd.wire.transfer import LedgerRow, ListTransfers, TransferList

PAGE = 2000
"""Rows in one answer, so that kvd is never busy with one for long."""
MOST = 100_000
"""Rows that are looked at for what kvd cannot look for."""
HIDDEN = "transfers of other users' engines are not shown"


def rows(
    settings: Settings, query: ListTransfers, last: int, source: str = "", checksum: str = ""
) -> TransferList:
    """The first ``last`` rows that match, from the trace ``source`` or from kvd. Raises `KvctlError`.

    kvd does not look into checksums: for those with this state of ``checksum`` its newest `MOST` matches are looked at.
    """
    if source:
        from kvctl.ledger.trace_rows import matching

        return matching(source, msgspec.structs.replace(query, limit=last))
    found = _found(settings, query, last, checksum)
    if found.hidden:
        say(daemon.hidden(found.hidden, HIDDEN))
    return found


def _found(settings: Settings, query: ListTransfers, last: int, checksum: str) -> TransferList:
    if checksum:
        return _compared(settings, query, last, checksum)
    if last <= PAGE or query.order != "newest":
        return daemon.ask(settings, msgspec.structs.replace(query, limit=last), TransferList)
    pages = list(_pages(settings, query, last))
    return msgspec.structs.replace(
        pages[-1], rows=tuple(row for page in pages for row in page.rows), hidden=pages[0].hidden
    )


def _compared(settings: Settings, query: ListTransfers, last: int, checksum: str) -> TransferList:
    pages = list(_pages(settings, msgspec.structs.replace(query, order="newest"), MOST))
    found = [row for page in pages for row in page.rows if row.record.checksum.state == checksum]
    found.sort(key=ORDERS[query.order])
    more = pages[-1].more or len(found) > last
    return msgspec.structs.replace(pages[-1], rows=tuple(found[:last]), more=more, hidden=pages[0].hidden)


def every_row(settings: Settings, query: ListTransfers, last: int) -> Iterator[LedgerRow]:
    """The newest ``last`` rows of kvd that match, newest first, as they come. Raises `KvctlError`."""
    hidden = 0
    for page in _pages(settings, query, last):
        hidden = hidden or page.hidden
        yield from page.rows
    if hidden:
        say(daemon.hidden(hidden, HIDDEN))


def _pages(settings: Settings, query: ListTransfers, last: int) -> Iterator[TransferList]:
    left, before = last, query.before
    with daemon.connected(settings) as operator:
        while True:
            asked = msgspec.structs.replace(query, limit=min(left, PAGE), before=before)
            page = daemon.put(operator, asked, TransferList)
            yield page
            left -= len(page.rows)
            if not page.more or left <= 0 or not page.rows:
                return
            if before and page.rows[-1].seq >= before:
                raise ProtocolError(
                    f"{daemon.who(operator)} answers for rows before {before} with row {page.rows[-1].seq} again",
                    hint="look at that host: its kvd is broken, or is none",
                )
            before = page.rows[-1].seq
