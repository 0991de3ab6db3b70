"""Ledgers in a directory of a test's own, the records in them, and damage to their files."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from kvd.service.config import LedgerSettings
from kvd.service.ledger.ledger import Ledger
from kvd.service.ledger.state import LedgerState
from kvd.wire.transfer import (
    ListTransfers,
    TransferRecord,
)


def record(number: int, state: str = "done", engine: str = "d") -> TransferRecord:
    return TransferRecord(
        transfer_id=f"t{number}", request_id=f"r{number}", local_engine=engine, local_rank="tp0", remote_engine="p",
        remote_generation="g", remote_request_id=f"p{number}", backend="direct", mode="pull", bytes=10,
        state="miss" if state == "miss" else "done",
    )  # fmt: skip


MANY = 1000


@contextlib.asynccontextmanager
async def ledger_at(path: Path, settings: LedgerSettings | None = None) -> AsyncIterator[Ledger]:
    ledger = Ledger(path, settings or LedgerSettings())
    await ledger.opened
    try:
        yield ledger
    finally:
        ledger.close(10)


async def until(look: Callable[[], object], seconds: float = 20.0) -> None:
    ends = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < ends
        await asyncio.sleep(0.01)


async def all_ids(ledger: Ledger) -> list[str]:
    found: list[str] = []
    before = 0
    while True:
        answer = await ledger.select(ListTransfers(limit=1000, before=before))
        found += [row.record.transfer_id for row in answer.rows]
        if not answer.more:
            return found
        before = answer.rows[-1].seq


async def round_trip(ledger: Ledger, seconds: float) -> LedgerState:
    """Ask the ledger's threads, past all that waits, for ``seconds`` at most; the state of the ledger after that."""
    async with asyncio.timeout(seconds):
        await ledger._answers()
    return ledger.state


async def fill(ledger: Ledger, first: int = 0, count: int = MANY) -> None:
    for start in range(first, first + count, 500):
        await ledger.append(tuple(record(n) for n in range(start, min(start + 500, first + count))))


def leaves(path: Path) -> list[int]:
    """Offsets of pages that hold rows of the table of transfers."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        size = int(database.execute("PRAGMA page_size").fetchone()[0])
        root = int(
            database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'transfers'").fetchone()[0]
        )
    data = path.read_bytes()
    at = (root - 1) * size
    assert data[at] == 5, "an interior page of a table"
    cells = int.from_bytes(data[at + 3 : at + 5], "big")
    pointers = [int.from_bytes(data[at + 12 + 2 * n : at + 14 + 2 * n], "big") for n in range(cells)]
    return [(int.from_bytes(data[at + p : at + p + 4], "big") - 1) * size for p in pointers]


def zero(path: Path, *offsets: int) -> None:
    with path.open("r+b") as file:
        for offset in offsets:
            file.seek(offset)
            file.write(bytes(4096))
