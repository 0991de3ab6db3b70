"""Leases as an operator sees them: which are read under just now, which are open, and the order to end one."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter

import msgspec

from kvd.service.daemon import Daemon
from kvd.service.engines.lease_entry import INHERITED, LeaseEntry
from kvd.service.engines.readers import Reader
from kvd.service.errors import RequestRefused
from kvd.service.handlers.operators import permitted
from kvd.service.handlers.pages import PAGE_ROWS, PlacedRows, page, place, whose
from kvd.service.handlers.sight import sight_of
from kvd.service.permission import Sight
from kvd.service.sockets.router import Caller
from kvd.wire.limits import MOST_LEASE_READERS
from kvd.wire.order import EndLease, LeaseEnding
from kvd.wire.query import LeaseList, LeaseReader, LeaseRow, ListLeases

LeasePlace = tuple[bool, str, str, str]
"""Whether an engine here claimed it, whose it is, its request, and the claim's id."""
_PLACES = msgspec.json.Decoder(LeasePlace)


async def list_leases(daemon: Daemon, caller: Caller, query: ListLeases) -> LeaseList:
    """The leases here that have readers, and those that engines here read under, the oldest first.

    Or every lease, page by page. Raises `RequestRefused`.
    """
    sight = await sight_of(daemon, caller)
    counts: Counter[str] = Counter()
    if query.every:
        after = place(query.after, _PLACES)
        rows, more = await page(daemon.slices, caller, _every(daemon, sight, query.engine_id, counts, after))
        return LeaseList(rows=rows, hidden=counts["hidden"], more=more)
    most = min(query.limit, PAGE_ROWS)
    given = await daemon.slices.collect(_given(daemon, sight, counts, most), whose(caller))
    taken = await daemon.slices.collect(_taken(daemon, sight, counts, most), whose(caller))
    found = sorted(given + taken, key=lambda row: -row.age)[:most]
    return LeaseList(
        rows=tuple(found),
        open=counts["open"],
        given=counts["given"],
        taken=counts["taken"],
        hidden=counts["hidden"],
    )


async def end_lease(daemon: Daemon, caller: Caller, message: EndLease) -> LeaseEnding:
    """End a lease of an engine here, or say what that would do. Raises `RequestRefused` with nothing changed."""
    engine_id, request_id = message.engine_id, message.request_id
    await permitted(daemon, caller, engine_id)
    lease = daemon.leases.find((engine_id, request_id))
    if lease is None:
        raise RequestRefused(
            "KVD-LEASE-UNKNOWN",
            f"engine {engine_id!r} holds no lease {request_id!r}",
            hint="it may have ended meanwhile: `kvctl leases` lists those that are open",
        )
    now = time.monotonic()
    ending = LeaseEnding(
        engine_id=engine_id,
        request_id=request_id,
        blocks=lease.blocks,
        readers=_readers(lease),
        seconds=max(0.0, min(lease.promised(), lease.expires) - now),
        carried_out=message.carry_out,
    )
    if message.carry_out:
        daemon.counters["orders.leases_ended"] += 1
        daemon.events.emit(
            "order.end_lease", engine_id, request=request_id, uid=caller.uid, pid=caller.pid, readers=ending.readers
        )  # fmt: skip
        daemon.leases.end(lease)
    return ending


def _every(
    daemon: Daemon, sight: Sight, engine_id: str, counts: Counter[str], after: LeasePlace | None
) -> PlacedRows[LeasePlace]:
    """Every lease in the order of places; what may not be seen is counted as the list is begun."""
    places: list[tuple[LeasePlace, LeaseEntry | Reader]] = []
    for (owner, request_id), lease in list(daemon.leases.table.items()):
        at = (False, owner, request_id, "")
        if not lease.dropped and engine_id in ("", owner) and (after is None or at > after):
            if sight.of(lease.owner.uid):
                places.append((at, lease))
            else:
                counts["hidden"] += 1
        yield None
    now, hosts = time.monotonic(), daemon.keys.places if daemon.keys is not None else {}
    for one in list(daemon.readers.remembered.values()):
        at = (True, one.key.engine_id, one.key.request_id, one.reader)
        named = engine_id in ("", one.key.engine_id, one.client.engine.engine_id)
        if one.until >= now and named and (after is None or at > after):
            if sight.of(one.client.uid):
                places.append((at, one))
            else:
                counts["hidden"] += 1
        yield None
    for at, found in heapq.nsmallest(PAGE_ROWS + 1, places, key=itemgetter(0)):
        if isinstance(found, Reader):
            yield at, _taken_row(found, now)
        else:
            row = _given_row(found, now)
            longest = heapq.nlargest(MOST_LEASE_READERS, found.readers.items(), key=itemgetter(1))
            claims = tuple(
                LeaseReader(who=_who(daemon, hosts, name), left=until - now) for (name, _), until in longest
            )
            yield at, msgspec.structs.replace(row, claims=claims)


def _readers(lease: LeaseEntry) -> int:
    return len(lease.readers) - (INHERITED in lease.readers)


def _given_row(lease: LeaseEntry, now: float) -> LeaseRow:
    return LeaseRow(
        engine_id=lease.owner.engine.engine_id,
        request_id=lease.request_id,
        age=max(0.0, now - lease.opened),
        left=max(0.0, lease.expires - now),
        readers=_readers(lease),
        blocks=lease.blocks,
        ending=lease.ending,
    )


def _who(daemon: Daemon, hosts: dict[bytes, str], claimant: str) -> str:
    """Whose readers go by that claimant's name (`kvd.service.engines.claimant`); ``hosts`` has places by key."""
    if not claimant:
        return "whoever an earlier kvd here let in"
    if (client := daemon.registry.clients.get(claimant)) is not None:
        return client.engine.engine_id
    key = claimant.removeprefix("key:")
    if key == claimant:
        return "an engine that has gone"
    if not key:
        return "another host"
    return hosts.get(key.encode(), f"the host with key {key}")


def _taken_row(one: Reader, now: float) -> LeaseRow:
    return LeaseRow(
        engine_id=one.key.engine_id,
        request_id=one.key.request_id,
        reader=one.client.engine.engine_id,
        age=max(0.0, now - one.since),
        left=max(0.0, one.until - now),
        readers=1,
        endpoint=one.key.endpoint,
        claim_id=one.reader,
    )


def _given(daemon: Daemon, sight: Sight, counts: Counter[str], most: int) -> Iterator[LeaseRow | None]:
    """Leases of engines here, in the order in which they were opened."""
    now = time.monotonic()
    for lease in list(daemon.leases.table.values()):
        if lease.dropped:
            continue
        if not sight.of(lease.owner.uid):
            counts["hidden"] += 1
            yield None
            continue
        readers = _readers(lease)
        counts["open"] += 1
        counts["given"] += bool(readers)
        yield _given_row(lease, now) if readers and counts["given"] <= most else None


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
            yield None if counts["taken"] > most else _taken_row(one, now)
