"""The ledger's database: its tables, and what is written into them. Everything here blocks: it is for a thread."""

from __future__ import annotations

import logging
import math
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kvd.service.config import LedgerSettings
from kvd.service.errors import LedgerError
from kvd.wire.identity import EngineCard
from kvd.wire.transfer import BlockRuns, KeptEngine, TransferRecord, bounded

log = logging.getLogger(__name__)

SCHEMA = 2
"""Version of the tables, in SQLite's ``user_version``. 0 had no columns for times, backends and blocks, 1 no codes."""
PRUNE_ROWS = 5000
"""Most records that one pruning deletes: what is reported meanwhile waits for it."""
MAX_INTEGER = (1 << 63) - 1
"""The largest that SQLite takes."""
REFRESH_SECONDS = 60.0
"""How often it is written down that an engine's records still come."""

_TABLES = """
CREATE TABLE IF NOT EXISTS transfers (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    transfer_id TEXT NOT NULL,
    request_id TEXT NOT NULL,
    remote_request_id TEXT NOT NULL,
    local_engine TEXT NOT NULL,
    local_rank TEXT NOT NULL,
    remote_engine TEXT NOT NULL,
    backend TEXT NOT NULL,
    mode TEXT NOT NULL,
    state TEXT NOT NULL,
    seconds REAL NOT NULL,
    bytes INTEGER NOT NULL,
    recorded REAL NOT NULL,
    record BLOB NOT NULL,
    blocks BLOB,
    code TEXT NOT NULL DEFAULT '',
    UNIQUE (transfer_id, local_engine, local_rank)
);
CREATE INDEX IF NOT EXISTS by_request ON transfers (request_id);
CREATE INDEX IF NOT EXISTS by_remote_request ON transfers (remote_request_id);
CREATE INDEX IF NOT EXISTS by_recorded ON transfers (recorded);
CREATE INDEX IF NOT EXISTS by_seconds ON transfers (seconds);
CREATE TABLE IF NOT EXISTS engines (
    engine_id TEXT NOT NULL,
    generation TEXT NOT NULL,
    seen REAL NOT NULL,
    engine BLOB NOT NULL,
    PRIMARY KEY (engine_id, generation)
);
"""
_INSERT = (
    "INSERT OR IGNORE INTO transfers (transfer_id, request_id, remote_request_id, local_engine, local_rank,"
    " remote_engine, backend, mode, state, seconds, bytes, recorded, record, blocks, code)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)

encode = msgspec.msgpack.Encoder().encode
decode_record = msgspec.msgpack.Decoder(TransferRecord).decode
decode_blocks = msgspec.msgpack.Decoder(tuple[tuple[BlockRuns, ...], tuple[BlockRuns, ...]]).decode
decode_engine = msgspec.msgpack.Decoder(KeptEngine).decode

EngineKey = tuple[str, str]
"""Engine id and generation."""


def open_database(path: Path) -> sqlite3.Connection:
    """The database, made where there is none. A file that is no database is set aside under another name, and logged.

    Raises `LedgerError` where the place cannot be used, or the ledger is that of a newer kvd.
    """
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        try:
            return _prepare(path)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            aside = path.with_name(f"{path.name}.broken-{int(time.time())}")
            log.warning(
                "the ledger %s is damaged (%s): set aside as %s, a new one begins", path, error, aside
            )
            path.rename(aside)
            return _prepare(path)
    except (OSError, sqlite3.Error) as error:
        raise LedgerError(f"the ledger {path} cannot be opened: {error}") from None


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A second connection, which cannot write and never waits for the one that does. Raises `sqlite3.Error`."""
    database = sqlite3.connect(path, check_same_thread=False, timeout=5.0)
    database.execute("PRAGMA query_only=ON")
    return database


def count(database: sqlite3.Connection) -> int:
    """How many records there are."""
    return int(database.execute("SELECT count(*) FROM transfers").fetchone()[0])


def known_engines(database: sqlite3.Connection) -> set[EngineKey]:
    """The engines of which a description is kept."""
    return set(database.execute("SELECT engine_id, generation FROM engines"))


def named_engines(records: Iterable[TransferRecord]) -> set[EngineKey]:
    """The engines on both sides of these records."""
    local = {(record.local_engine, record.local_generation) for record in records}
    return local | {(record.remote_engine, record.remote_generation) for record in records}


def insert(database: sqlite3.Connection, records: Iterable[TransferRecord]) -> tuple[TransferRecord, ...]:
    """Write records down; those that were not there before."""
    now = time.time()
    return tuple(record for record in records if database.execute(_INSERT, _row(record, now)).rowcount)


def keep_engines(database: sqlite3.Connection, cards: Iterable[EngineCard]) -> None:
    """Write down what a later export of these engines' transfers needs: facts and geometry, no place of theirs."""
    now = time.time()
    database.executemany(
        "INSERT OR REPLACE INTO engines (engine_id, generation, seen, engine) VALUES (?, ?, ?, ?)",
        [(card.engine.engine_id, card.generation, now, encode(_kept(card))) for card in cards],
    )


def refresh_engines(database: sqlite3.Connection, keys: Iterable[EngineKey]) -> None:
    """Write down that records still name these engines."""
    now = time.time()
    database.executemany(
        "UPDATE engines SET seen = ? WHERE engine_id = ? AND generation = ?", [(now, *key) for key in keys]
    )


def prune(database: sqlite3.Connection, settings: LedgerSettings, total: int) -> tuple[int, bool]:
    """Delete the oldest records beyond the bounds, `PRUNE_ROWS` at most, and engines that no record can name any more.

    Returns how many records went, and whether more are to go.
    """
    oldest = time.time() - settings.max_age_seconds
    excess = max(0, total - settings.max_rows)
    used = _bytes_used(database)
    if used > settings.max_bytes:
        excess = max(excess, int(total * (used - settings.max_bytes) / used) + 1)
    last = database.execute(
        "SELECT max(seq) FROM (SELECT seq FROM transfers ORDER BY seq LIMIT ?)", (min(excess, PRUNE_ROWS),)
    ).fetchone()[0]
    gone = database.execute("DELETE FROM transfers WHERE seq <= ?", (last or 0,)).rowcount
    gone += database.execute(
        "DELETE FROM transfers WHERE seq IN"
        " (SELECT seq FROM transfers WHERE recorded < ? ORDER BY recorded LIMIT ?)",
        (oldest, PRUNE_ROWS - gone),
    ).rowcount
    if gone:
        first = database.execute("SELECT min(recorded) FROM transfers").fetchone()[0]
        if first is not None:
            database.execute("DELETE FROM engines WHERE seen < ?", (first - 2 * REFRESH_SECONDS,))
    return gone, gone >= PRUNE_ROWS or (gone > 0 and _bytes_used(database) > settings.max_bytes)


def _bytes_used(database: sqlite3.Connection) -> int:
    pages, free, size = (
        int(database.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def _row(record: TransferRecord, now: float) -> tuple[object, ...]:
    r = bounded(record)
    blocks = encode((r.local_blocks, r.remote_blocks)) if r.local_blocks or r.remote_blocks else None
    bare = msgspec.structs.replace(r, local_blocks=(), remote_blocks=()) if blocks else r
    seconds = sum(r.stages.values())
    seconds = seconds if math.isfinite(seconds) else 0.0
    return (
        r.transfer_id, r.request_id, r.remote_request_id, r.local_engine, r.local_rank, r.remote_engine, r.backend,
        r.mode, r.state, seconds, min(r.bytes, MAX_INTEGER), now, encode(bare), blocks, r.code,
    )  # fmt: skip


def _kept(card: EngineCard) -> KeptEngine:
    return KeptEngine(
        engine=msgspec.structs.replace(card.engine, facts=card.facts),
        generation=card.generation,
        geometries=tuple(worker.geometry for worker in card.workers),
    )


def _prepare(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, check_same_thread=False, timeout=5.0)
    try:
        database.execute("PRAGMA journal_mode=WAL")
        # A record that a worker was told is safe must survive a power cut, so the log is synced at each commit.
        database.execute("PRAGMA synchronous=FULL")
        database.execute(f"PRAGMA journal_size_limit={64 << 20}")
        if (version := _version(database, path)) < SCHEMA:
            _upgrade(database, version)
        count(database)
    except (sqlite3.Error, LedgerError):
        database.close()
        raise
    return database


def _version(database: sqlite3.Connection, path: Path) -> int:
    version = int(database.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA:
        raise LedgerError(
            f"the ledger {path} has schema {version}, this kvd knows {SCHEMA} and older ones",
            hint="start the newer kvd, or move the file away",
        )
    return version


def _upgrade(database: sqlite3.Connection, version: int) -> None:
    """From an older schema, or from nothing, in one transaction.

    From schema 0 old records go over in the order in which they came; from 1 they stay, and have no code.
    """
    if version == 1:
        database.execute("BEGIN IMMEDIATE")
        with database:
            database.execute("ALTER TABLE transfers ADD COLUMN code TEXT NOT NULL DEFAULT ''")
            database.execute(f"PRAGMA user_version={SCHEMA}")
        return
    old = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'transfers'").fetchone()
    database.execute("BEGIN IMMEDIATE")
    with database:
        if old:
            for name in ("by_request", "by_remote_request", "by_recorded"):
                database.execute(f"DROP INDEX IF EXISTS {name}")
            database.execute("ALTER TABLE transfers RENAME TO old_transfers")
        for statement in _TABLES.split(";"):
            database.execute(statement)
        if old:
            rows = database.execute("SELECT recorded, record FROM old_transfers ORDER BY seq")
            database.executemany(
                _INSERT, (_row(decode_record(record), recorded) for recorded, record in rows)
            )
            database.execute("DROP TABLE old_transfers")
        database.execute(f"PRAGMA user_version={SCHEMA}")
