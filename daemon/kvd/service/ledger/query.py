"""What is asked of the ledger: rows of transfers by filter, engines that they name."""

from __future__ import annotations

import logging
import sqlite3
import time
from dataclasses import dataclass

import msgspec

from kvd.service.ledger.store import MAX_INTEGER, decode_blocks, decode_engine, decode_record
from kvd.wire.transfer import KeptEngine, LedgerRow, ListTransfers, TransferList, TransferRecord

log = logging.getLogger(__name__)

MAX_LIMIT = 10_000
MAX_ANSWER = 4 << 20
"""Bytes of the records in one answer; the next one continues. The loop packs them in some 10 ms."""

_ORDERS = {"newest": "seq DESC", "slowest": "seconds DESC, seq DESC", "largest": "bytes DESC, seq DESC"}

_IS_OWN = "is_of_own_engine(local_engine) AND coalesce(uid, reported_by(record)) IS ?"
"""Rows of schemas before 3 have their user in the record alone."""


@dataclass(frozen=True, slots=True)
class Own:
    """What somebody may see who may not see all: records that his processes reported, of these engines."""

    uid: int
    engines: frozenset[str]


def select(
    database: sqlite3.Connection, query: ListTransfers, total: int, own: Own | None = None
) -> TransferList:
    """The matching rows, `MAX_LIMIT` and `MAX_ANSWER` at most; what cannot be decoded is left out.

    With ``own`` those alone, and how many there are of others' engines, `MAX_LIMIT` at most. Whether these match is
    not told: who may not see them could find out by filters what stands in them. Raises `sqlite3.Error`.
    """
    conditions, values = _conditions(query)
    limit = min(max(query.limit, 0), MAX_LIMIT)
    hidden = 0
    if own is not None:
        database.create_function("is_of_own_engine", 1, own.engines.__contains__)
        database.create_function("reported_by", 1, _reported_by)
        hidden = database.execute(
            "SELECT count(*) FROM (SELECT 1 FROM transfers WHERE NOT is_of_own_engine(local_engine) LIMIT ?)",
            (MAX_LIMIT,),
        ).fetchone()[0]
        conditions.append(_IS_OWN)
        values.append(own.uid)
    found = database.execute(
        f"SELECT seq, recorded, record, {'blocks' if query.blocks else 'NULL'} FROM transfers"  # noqa: S608 (fixed texts)
        f" WHERE {' AND '.join(conditions)} ORDER BY {_ORDERS[query.order]} LIMIT ?",
        (*values, limit + 1),
    )
    rows: list[LedgerRow] = []
    spoilt: list[int] = []
    size, more = 0, False
    for seq, recorded, record, blocks in found:
        size += len(record) + 2 * len(blocks or b"")  # lists of numbers take longest to pack
        if len(rows) == limit or (size > MAX_ANSWER and rows):
            more = True
            break
        try:
            rows.append(LedgerRow(seq, _whole(record, blocks), recorded))
        except msgspec.MsgspecError:  # its page was spoilt in a way that SQLite does not see
            spoilt.append(seq)
    found.close()
    if spoilt:
        log.warning("%d records of the ledger cannot be decoded: number %d ...", len(spoilt), spoilt[0])
    return TransferList(rows=tuple(rows), total=total, more=more, hidden=hidden)


def _reported_by(record: bytes) -> int | None:
    """The user whose process reported it; of one that cannot be decoded nobody can say."""
    try:
        return int(decode_record(record).uid)
    except msgspec.MsgspecError:
        return None


def kept_engine(database: sqlite3.Connection, engine_id: str, generation: str) -> KeptEngine | None:
    """What is kept of an engine. Raises `sqlite3.Error` or `msgspec.MsgspecError`."""
    row = database.execute(
        "SELECT engine FROM engines WHERE engine_id = ? AND generation = ?", (engine_id, generation)
    ).fetchone()
    return decode_engine(row[0]) if row else None


def _number(given: int) -> int:
    """A number as SQLite takes it: 64 bits with a sign."""
    return max(-MAX_INTEGER, min(given, MAX_INTEGER))


def _whole(record: bytes, blocks: bytes | None) -> TransferRecord:
    bare = decode_record(record)
    if blocks is None:
        return bare
    local, remote = decode_blocks(blocks)
    return msgspec.structs.replace(bare, local_blocks=local, remote_blocks=remote)


def _conditions(query: ListTransfers) -> tuple[list[str], list[object]]:
    """What a row must fulfil, in SQL, and the values in it."""
    here, there = query.engine_id, query.peer
    number = int(query.any_id) if query.any_id.isdecimal() and len(query.any_id) < 19 else -1
    filters: list[tuple[object, str, tuple[object, ...]]] = [
        (True, "seq > ?", (_number(query.after),)),
        (query.before, "seq < ?", (_number(query.before),)),
        # By number, not by time: rows then come newest first without being sorted.
        (
            query.within,
            "seq >= (SELECT seq FROM transfers WHERE recorded >= ? ORDER BY recorded LIMIT 1)",
            (time.time() - query.within,),
        ),
        (
            query.any_id,
            "(transfer_id = ? OR request_id = ? OR remote_request_id = ? OR seq = ?)",
            (query.any_id, query.any_id, query.any_id, number),
        ),
        (query.request_id, "(request_id = ? OR remote_request_id = ?)", (query.request_id,) * 2),
        (
            here and there,
            "((local_engine = ? AND remote_engine = ?) OR (remote_engine = ? AND local_engine = ?))",
            (here, there, here, there),
        ),
        (here and not there, "(local_engine = ? OR remote_engine = ?)", (here, here)),
        (there and not here, "remote_engine = ?", (there,)),
        (query.state, "state = ?", (query.state,)),
        (query.code, "code = ?", (query.code,)),
        (query.backend, "backend = ?", (query.backend,)),
        (query.mode, "mode = ?", (query.mode,)),
        (query.slower_than, "seconds > ?", (query.slower_than,)),
    ]
    given = [(condition, values) for wanted, condition, values in filters if wanted]
    return [condition for condition, _ in given], [value for _, values in given for value in values]
