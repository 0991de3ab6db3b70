"""Which leases are read under just now: what an operator sees as transfers on their way."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from kvd.service.daemon import Daemon
from kvd.service.engines.leases import INHERITED
from kvd.service.handlers.pages import PAGE_ROWS
from kvd.service.handlers.sight import sight_of
from kvd.service.permission import Sight
from kvd.service.sockets.router import Caller
from kvd.wire.query import LeaseList, LeaseRow, ListLeases


async def list_leases(daemon: Daemon, caller: Caller, query: ListLeases) -> LeaseList:
    """The leases here that have readers, and those that engines here read under, the oldest first."""
    sight = await sight_of(daemon, caller)
    counts: Counter[str] = Counter()
    most = min(query.limit, PAGE_ROWS)
    given = await daemon.slices.collect(_given(daemon, sight, counts, most))
    taken = await daemon.slices.collect(_taken(daemon, sight, counts, most))
    rows = sorted(given + taken, key=lambda row: -row.age)[:most]
    return LeaseList(
        rows=tuple(rows),
        open=counts["open"],
        given=counts["given"],
        taken=counts["taken"],
        hidden=counts["hidden"],
    )


def _given(daemon: Daemon, sight: Sight, counts: Counter[str], most: int) -> Iterator[LeaseRow | None]:
    """Leases of engines here, in the order in which they were opened."""
    now = time.monotonic()
    for (engine_id, request_id), lease in list(daemon.leases.table.items()):
        readers = len(lease.readers) - (INHERITED in lease.readers)
        if lease.dropped:
            continue
        if not sight.of(lease.owner.uid):
            counts["hidden"] += 1
            yield None
            continue
        counts["open"] += 1
        counts["given"] += bool(readers)
        if not readers or counts["given"] > most:
            yield None
            continue
        yield LeaseRow(
            engine_id=engine_id,
            request_id=request_id,
            age=max(0.0, now - lease.opened),
            left=max(0.0, lease.expires - now),
            readers=readers,
            blocks=lease.blocks,
        )


def _taken(daemon: Daemon, sight: Sight, counts: Counter[str], most: int) -> Iterator[LeaseRow | None]:
    """Leases that engines here claimed and have not released. A renewed claim comes behind those made meanwhile."""
    now = time.monotonic()
    for one in list(daemon.readers.remembered.values()):
        if one.until < now:
            yield None
        elif not sight.of(one.client.uid):
            counts["hidden"] += 1
            yield None
        else:
            counts["taken"] += 1
            yield (
                None
                if counts["taken"] > most
                else LeaseRow(
                    engine_id=one.key.engine_id,
                    request_id=one.key.request_id,
                    reader=one.client.engine.engine_id,
                    age=max(0.0, now - one.since),
                    left=one.until - now,
                    readers=1,
                    endpoint=one.key.endpoint,
                )
            )
