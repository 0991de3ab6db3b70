"""The ledger's database: its tables, and what is written into them. Everything here blocks: it is for a thread."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from kvd.service.config import LedgerSettings
from kvd.service.ledger.faults import Damaged
from kvd.wire.identity import EngineCard
from kvd.wire.transfer import BlockRuns, KeptEngine, TransferRecord, bounded

SCHEMA = 3
"""Version of the tables, in SQLite's ``user_version``. 0 had no columns for times, backends and blocks, 1 none for
codes and 2 none for users."""
BUSY_SECONDS = 0.5
"""How long another process may hold the database before that counts as a fault: somebody's `sqlite3` in a shell."""
STEPS = 20_000
"""Steps of SQLite's machine between two looks at what else there is: about a millisecond."""
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
    uid INTEGER,
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
    "INSERT OR IGNORE INTO transfers (seq, transfer_id, request_id, remote_request_id, local_engine, local_rank,"
    " remote_engine, backend, mode, state, seconds, bytes, recorded, record, blocks, code, uid)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_FIT_TRANSFERS = (
    "SELECT seq, transfer_id, request_id, remote_request_id, local_engine, local_rank, remote_engine, backend, mode,"
    " state, seconds, bytes, recorded, record, blocks, code, uid FROM transfers LIMIT 0"
)
_FIT_ENGINES = "SELECT engine_id, generation, seen, engine FROM engines LIMIT 0"
"""It fails where a table or a column is missing, as the one above."""

encode = msgspec.msgpack.Encoder().encode
decode_record = msgspec.msgpack.Decoder(TransferRecord).decode
decode_blocks = msgspec.msgpack.Decoder(tuple[tuple[BlockRuns, ...], tuple[BlockRuns, ...]]).decode
decode_engine = msgspec.msgpack.Decoder(KeptEngine).decode

EngineKey = tuple[str, str]
"""Engine id and generation."""


def open_database(path: Path, between: Callable[[], None] = lambda: None) -> sqlite3.Connection:
    """The database for its one writer, made where there is none, brought to `SCHEMA` where it is older.

    ``between`` is called again and again while a statement runs. Raises `sqlite3.Error` (`Damaged` where it is not the
    ledger's), `NewerSchema` and `msgspec.MsgspecError`.
    """
    database = sqlite3.connect(path, check_same_thread=False, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        database.set_progress_handler(between, STEPS)
        database.execute("PRAGMA journal_mode=WAL")
        # A record that a worker was told is safe must survive a power cut, so the log is synced at each commit.
        database.execute("PRAGMA synchronous=FULL")
        database.execute(f"PRAGMA journal_size_limit={64 << 20}")
        if (version := _known_version(database)) < SCHEMA:
            _upgrade(database, version)
        _check_tables(database)
        with transaction(database):
            pass  # what can be read alone is no ledger
    except BaseException:
        database.close()
        raise
    return database


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A connection that cannot write, never waits for the one that does, and makes no file. Raises `sqlite3.Error`."""
    place = f"file:{urllib.parse.quote(str(path))}?mode=ro"
    database = sqlite3.connect(
        place, uri=True, check_same_thread=False, timeout=BUSY_SECONDS, isolation_level=None
    )
    database.execute("PRAGMA query_only=ON")
    return database


@contextlib.contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """What is done in the block is on disk after it, or undone where it raises. Raises `sqlite3.Error`."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:  # SQLite may have undone it itself, on a full disk
            database.execute("ROLLBACK")
        raise


def probe(database: sqlite3.Connection) -> None:
    """Write something that changes nothing, to see whether that is possible. Raises `sqlite3.Error`."""
    database.execute(f"PRAGMA user_version={SCHEMA}")


def readable(database: sqlite3.Connection) -> bool:
    """Whether a connection, at which something failed, is good for reading and has nothing under way."""
    try:
        database.execute("SELECT 1 FROM transfers LIMIT 1").fetchone()
    except sqlite3.Error:
        return False
    return not database.in_transaction


def last_seq(database: sqlite3.Connection) -> int:
    """The highest number that a record ever had, 0 before the first."""
    found = database.execute("SELECT seq FROM sqlite_sequence WHERE name = 'transfers'").fetchone()
    return int(found[0]) if found else 0


def number_after(database: sqlite3.Connection, seq: int) -> None:
    """New records have higher numbers than this one."""
    with transaction(database):
        if last_seq(database) < seq:
            database.execute("DELETE FROM sqlite_sequence WHERE name = 'transfers'")
            database.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('transfers', ?)", (seq,))


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


def insert(
    database: sqlite3.Connection, records: Iterable[TransferRecord], now: float
) -> tuple[TransferRecord, ...]:
    """Write records down as of ``now``; those that were not there before."""
    return tuple(r for r in records if database.execute(_INSERT, (None, *row(r, now))).rowcount)


def insert_again(database: sqlite3.Connection, seq: int, recorded: float, record: TransferRecord) -> bool:
    """Write down a record of another file, under its number where that is free; whether it was not there."""
    values = row(record, recorded)
    # The first may fail because of the number alone.
    return any(database.execute(_INSERT, (number, *values)).rowcount for number in (seq, None))


def keep_engines(database: sqlite3.Connection, cards: Iterable[EngineCard], now: float) -> None:
    """Write down what a later export of these engines' transfers needs: facts and geometry, no place of theirs."""
    database.executemany(
        "INSERT OR REPLACE INTO engines (engine_id, generation, seen, engine) VALUES (?, ?, ?, ?)",
        [(card.engine.engine_id, card.generation, now, encode(_kept(card))) for card in cards],
    )


def refresh_engines(database: sqlite3.Connection, keys: Iterable[EngineKey], now: float) -> None:
    """Write down that records still name these engines. A clock that is set back makes nothing older."""
    database.executemany(
        "UPDATE engines SET seen = max(seen, ?) WHERE engine_id = ? AND generation = ?",
        [(now, *key) for key in keys],
    )


def drop_oldest(database: sqlite3.Connection, most: int) -> int:
    """Delete so many of the oldest records; how many there were."""
    last = database.execute(
        "SELECT max(seq) FROM (SELECT seq FROM transfers ORDER BY seq LIMIT ?)", (most,)
    ).fetchone()[0]
    return database.execute("DELETE FROM transfers WHERE seq <= ?", (last or 0,)).rowcount


def drop_older(database: sqlite3.Connection, than: float, most: int) -> int:
    """Delete so many of the records from before that Unix time; how many there were."""
    return database.execute(
        "DELETE FROM transfers WHERE seq IN"
        " (SELECT seq FROM transfers WHERE recorded < ? ORDER BY recorded LIMIT ?)",
        (than, most),
    ).rowcount


def drop_unnamed_engines(database: sqlite3.Connection) -> int:
    """Delete descriptions of engines that no record can name any more; how many."""
    first = database.execute("SELECT min(recorded) FROM transfers").fetchone()[0]
    if first is None:
        return 0
    return database.execute("DELETE FROM engines WHERE seen < ?", (first - 2 * REFRESH_SECONDS,)).rowcount


def drop_engines_beyond(database: sqlite3.Connection, most: int) -> int:
    """Delete the descriptions that were named longest ago, until the others take ``most`` bytes; how many."""
    return database.execute(
        "DELETE FROM engines WHERE rowid IN (SELECT rowid FROM"
        " (SELECT rowid, sum(length(engine)) OVER (ORDER BY seen DESC, rowid) AS size FROM engines) WHERE size > ?)",
        (most,),
    ).rowcount


def excess(database: sqlite3.Connection, settings: LedgerSettings, total: int) -> int:
    """How many of the ``total`` records are beyond the bounds, by number and by bytes."""
    over = max(0, total - settings.max_rows)
    used = _bytes_used(database)
    if used > settings.max_bytes:
        over = max(over, int(total * (used - settings.max_bytes) / used) + 1)
    return over


def _bytes_used(database: sqlite3.Connection) -> int:
    pages, free, size = (
        int(database.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def row(record: TransferRecord, now: float) -> tuple[object, ...]:
    """The values of a record's columns but its number, as of ``now``."""
    r = bounded(record)
    blocks = encode((r.local_blocks, r.remote_blocks)) if r.local_blocks or r.remote_blocks else None
    bare = msgspec.structs.replace(r, local_blocks=(), remote_blocks=()) if blocks else r
    seconds = sum(r.stages.values())
    seconds = seconds if math.isfinite(seconds) else 0.0
    return (
        r.transfer_id, r.request_id, r.remote_request_id, r.local_engine, r.local_rank, r.remote_engine, r.backend,
        r.mode, r.state, seconds, min(r.bytes, MAX_INTEGER), now, encode(bare), blocks, r.code, r.uid,
    )  # fmt: skip


def _kept(card: EngineCard) -> KeptEngine:
    return KeptEngine(
        engine=msgspec.structs.replace(card.engine, facts=card.facts),
        generation=card.generation,
        geometries=tuple(worker.geometry for worker in card.workers),
    )


def _known_version(database: sqlite3.Connection) -> int:
    version = int(database.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA:
        raise NewerSchema(version)
    return version


def _check_tables(database: sqlite3.Connection) -> None:
    try:
        database.execute(_FIT_TRANSFERS)
        database.execute(_FIT_ENGINES)
    except sqlite3.OperationalError as error:
        raise Damaged(str(error)) from None


class NewerSchema(Exception):
    """The ledger of a newer kvd, which this one cannot read."""

    def __init__(self, version: int) -> None:
        super().__init__(f"schema {version}, this kvd knows {SCHEMA} and older ones")
        self.version = version


def _upgrade(database: sqlite3.Connection, version: int) -> None:
    """From an older schema, or from nothing, in one transaction. Raises `Damaged` where the tables are others.

    From schema 0 old records go over in the order in which they came. From 1 and 2 they stay as they are, so that a
    large file takes no longer than a small one: those of 1 have no code, and `query.select` reads users from records.
    """
    try:
        with transaction(database):
            if version == 0:
                _from_nothing(database)
            if version == 1:
                database.execute("ALTER TABLE transfers ADD COLUMN code TEXT NOT NULL DEFAULT ''")
            if version:
                database.execute("ALTER TABLE transfers ADD COLUMN uid INTEGER")
            database.execute(f"PRAGMA user_version={SCHEMA}")
    except msgspec.MsgspecError as error:
        raise Damaged(f"a record of schema {version}: {error}") from None
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_ERROR:
            raise
        raise Damaged(f"tables of schema {version}: {error}") from None


def _from_nothing(database: sqlite3.Connection) -> None:
    old = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'transfers'").fetchone()
    if old:
        for name in ("by_request", "by_remote_request", "by_recorded"):
            database.execute(f"DROP INDEX IF EXISTS {name}")
        database.execute("ALTER TABLE transfers RENAME TO old_transfers")
    for statement in _TABLES.split(";"):
        database.execute(statement)
    if old:
        rows = database.execute("SELECT recorded, record FROM old_transfers ORDER BY seq")
        values = ((None, *row(decode_record(record), recorded)) for recorded, record in rows)
        database.executemany(_INSERT, values)
        database.execute("DROP TABLE old_transfers")
