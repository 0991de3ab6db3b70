"""A ledger whose files are damaged or not ours: kvd goes on, and what was acknowledged is there once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.service.errors import LedgerError
from kvd.service.ledger import salvage, store, writer
from kvd.wire.transfer import ListTransfers
from tests.support.ledgers import MANY, all_ids, fill, leaves, ledger_at, record, until, zero


def names(path: Path) -> set[str]:
    """What lies beside the ledger, without times and SQLite's own files."""
    return {p.name.partition("-")[0] for p in path.parent.iterdir() if not p.name.endswith(("-wal", "-shm"))}


def filled(path: Path) -> None:
    async def work() -> None:
        async with ledger_at(path) as ledger:
            await fill(ledger)

    asyncio.run(work())


def test_what_was_set_aside_is_told_until_it_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LOOK_SECONDS", 0.05)
    path = tmp_path / "l"
    path.write_bytes(b"garbage" * 5000)

    async def work() -> None:
        async with ledger_at(path) as ledger:
            await until(lambda: any(name.startswith("l.broken-") for name in ledger.state.aside))
            [name] = ledger.state.aside
            assert ledger.state.open
            await ledger.append((record(1),))
            (tmp_path / name).unlink()
            await until(lambda: not ledger.state.aside)

    asyncio.run(work())


@pytest.mark.parametrize("pages", [1, 3])
def test_of_a_damaged_ledger_all_is_taken_over_that_can_be_read(tmp_path: Path, pages: int) -> None:
    path = tmp_path / "l"
    filled(path)
    at = leaves(path)
    zero(path, *at[5 : 5 + 7 * pages : 7])

    async def work() -> None:
        async with ledger_at(path) as ledger:
            assert ledger.state.open, "what is damaged in the middle is not seen yet"
            with contextlib.suppress(LedgerError):
                await all_ids(ledger)
            await until(lambda: ledger.state.generation == 2)
            await ledger.append((record(1), record(9999)))
            await until(lambda: any("broken" in name for name in names(path)))
            found = await all_ids(ledger)
            assert len(found) == len(set(found)) == ledger.state.rows
            assert MANY - 20 * pages <= len(found) - 1 < MANY
            newest = (await ledger.select(ListTransfers(limit=1))).rows[0]
            assert (newest.seq > MANY, newest.record.transfer_id) == (True, "t9999"), "numbers go on"

    asyncio.run(work())
    assert names(path) == {"l", "l.broken", "ledger.lock"}


def test_a_kvd_that_is_killed_while_it_takes_records_over_goes_on_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "l"
    filled(path)
    path.rename(tmp_path / "l.damaged-17")
    with monkeypatch.context() as patch:
        patch.setattr(salvage, "ROWS", 10)
        patch.setattr(writer, "BREATH_SECONDS", 0.05)

        async def begin() -> None:
            async with ledger_at(path) as ledger:
                await until(lambda: ledger.state.rows >= 20)

        asyncio.run(begin())

    async def go_on() -> None:
        async with ledger_at(path) as ledger:
            assert ledger.state.rows < MANY
            await until(lambda: names(path) == {"l", "l.broken", "ledger.lock"})
            assert sorted(await all_ids(ledger)) == sorted(f"t{n}" for n in range(MANY))
            assert [row.seq for row in (await ledger.select(ListTransfers(limit=1))).rows] == [MANY]

    asyncio.run(go_on())


def test_a_start_that_finds_a_log_without_its_database_completes_what_was_begun(tmp_path: Path) -> None:
    """SIGKILL between two renames: the newest records are in the log, which must not be taken for another's."""
    path = tmp_path / "l"

    async def begin() -> None:
        async with ledger_at(path) as ledger:
            await fill(ledger, count=50)
            for suffix in ("", "-wal"):
                shutil.copy(f"{path}{suffix}", tmp_path / f"copy{suffix}")

    asyncio.run(begin())
    (tmp_path / "copy").rename(path)
    (tmp_path / "copy-wal").rename(tmp_path / "l.damaged-17-wal")

    async def go_on() -> None:
        async with ledger_at(path) as ledger:
            await until(lambda: "l.broken" in names(path))
            assert len(await all_ids(ledger)) == 50

    asyncio.run(go_on())


def header(path: Path) -> None:
    path.write_bytes(b"no database at all" * 1000)


def first_page(path: Path) -> None:
    zero(path, 0)


def truncated(path: Path) -> None:
    os.truncate(path, 5000)


def another(path: Path) -> None:
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript("CREATE TABLE transfers (seq); PRAGMA user_version=2")


def newer(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version=99")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("spoil", [header, first_page, truncated, another, newer, folder, pipe])
def test_a_start_sets_aside_what_is_no_ledger_of_ours(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = tmp_path / "l"
    filled(path)
    spoil(path)

    async def work() -> None:
        async with ledger_at(path) as ledger:
            await until(lambda: ledger.state.open)
            await ledger.append((record(1),))
            assert "t1" in await all_ids(ledger)
            aside = "l.schema" if spoil is newer else "l.broken"
            await until(lambda: names(path) == {"l", aside, "ledger.lock"})

    asyncio.run(work())


def test_an_older_kvd_leaves_a_newer_ledger_alone_and_the_next_one_takes_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "l"
    filled(path)
    newer(path)

    async def older() -> None:
        async with ledger_at(path) as ledger:
            await ledger.append((record(MANY),))

    asyncio.run(older())
    monkeypatch.setattr(store, "SCHEMA", 99)

    async def next_one() -> None:
        async with ledger_at(path) as ledger:
            await until(lambda: ledger.state.rows == MANY + 1)
            assert len(set(await all_ids(ledger))) == MANY + 1

    asyncio.run(next_one())


def test_a_row_that_cannot_be_decoded_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "l"

    async def work() -> None:
        async with ledger_at(path) as ledger:
            await fill(ledger, count=10)
            with contextlib.closing(sqlite3.connect(path)) as database, database:
                database.execute("UPDATE transfers SET record = x'00' WHERE seq = 5")
            assert len(await all_ids(ledger)) == 9

    asyncio.run(work())
