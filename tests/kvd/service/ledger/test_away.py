"""A ledger whose files are gone, full or locked: kvd goes on, and what was acknowledged is there once."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.service.config import LedgerSettings
from kvd.service.errors import LedgerError
from kvd.service.ledger.ledger import Ledger
from kvd.service.ledger.state import LedgerState
from kvd.wire.transfer import ListTransfers
from tests.support.full_disk import no_file_beyond
from tests.support.ledgers import MANY, all_ids, fill, ledger_at, record, round_trip, until


def deleted(path: Path) -> None:
    for name in list(path.parent.iterdir()):
        name.unlink()


def log_deleted(path: Path) -> None:
    Path(f"{path}-wal").unlink()


def index_deleted(path: Path) -> None:
    Path(f"{path}-shm").unlink()


def directory_deleted(path: Path) -> None:
    shutil.rmtree(path.parent)


def directory_moved(path: Path) -> None:
    path.parent.rename(path.parent.parent / "elsewhere")


def replaced(path: Path) -> None:
    deleted(path)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE mine (a)")


def garbage(path: Path) -> None:
    deleted(path)
    path.write_bytes(b"garbage" * 1000)


@pytest.mark.parametrize(
    "lose", [deleted, log_deleted, index_deleted, directory_deleted, directory_moved, replaced, garbage]
)
@pytest.mark.parametrize("idle", [False, True])
def test_files_that_are_gone_are_written_again(
    tmp_path: Path, lose: Callable[[Path], None], idle: bool
) -> None:
    path = tmp_path / "state" / "l"
    saved = tmp_path / "killed" / "l"

    async def work() -> None:
        async with ledger_at(path) as ledger:
            await fill(ledger)
            lose(path)
            if idle:
                await until(lambda: ledger.state.generation == 2)
            await ledger.append((record(MANY),))
            # As a SIGKILL right now would leave it.
            saved.parent.mkdir()
            for suffix in ("", "-wal"):
                shutil.copy(f"{path}{suffix}", f"{saved}{suffix}")
            assert len(await all_ids(ledger)) == MANY + 1

    async def after() -> None:
        async with ledger_at(saved) as ledger:
            assert sorted(await all_ids(ledger)) == sorted(f"t{n}" for n in range(MANY + 1))

    asyncio.run(work())
    asyncio.run(after())


def test_files_that_cannot_be_written_again_are_kept_open_until_they_can(tmp_path: Path) -> None:
    path = tmp_path / "state" / "l"

    async def work() -> None:
        async with ledger_at(path) as ledger:
            await fill(ledger, count=100)
            assert len(await all_ids(ledger)) == 100
            shutil.rmtree(path.parent)
            path.parent.write_text("no directory")
            with pytest.raises(LedgerError, match="is away: "):
                await ledger.append((record(100),))
            assert (ledger.state.open, ledger.state.reason != "") == (False, True)
            assert len(await all_ids(ledger)) == 101, "it can be asked, and the refused one comes again"
            path.parent.unlink()
            await until(lambda: ledger.state.open)
            await ledger.append((record(100), record(101)))
            assert len(await all_ids(ledger)) == 102

    asyncio.run(work())


def test_a_full_disk_refuses_records_until_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "l"

    async def work() -> None:
        async with ledger_at(path) as ledger:
            await fill(ledger, count=10)
            with no_file_beyond(5000):
                with pytest.raises(LedgerError) as refused:
                    await ledger.append((record(10),))
                assert (refused.value.code, refused.value.final) == ("KVD-LEDGER", False)
                assert not ledger.state.open
                async with asyncio.timeout(5.0):
                    await round_trip(ledger, 5.0)
                assert len(await all_ids(ledger)) == 10
            await until(lambda: ledger.state.open)
            await ledger.append((record(10),))
            assert len(await all_ids(ledger)) == 11

    asyncio.run(work())


def test_a_start_on_a_full_disk_goes_on_when_there_is_room(tmp_path: Path) -> None:
    async def work() -> None:
        with no_file_beyond(1000):
            ledger = Ledger(tmp_path / "state" / "l", LedgerSettings())
            await ledger.opened
            assert not ledger.state.open
            with pytest.raises(LedgerError, match="is away"):
                await ledger.append((record(1),))
            with pytest.raises(LedgerError, match="is away"):
                await ledger.select(ListTransfers())
            await round_trip(ledger, 5.0)
        await until(lambda: ledger.state.open)
        await ledger.append((record(1),))
        ledger.close(5)

    asyncio.run(work())


def test_a_start_without_a_directory_waits_for_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def work() -> LedgerState:
        ledger = Ledger(tmp_path / "file" / "l", LedgerSettings())
        await ledger.opened
        away = ledger.state
        (tmp_path / "file").unlink()
        await until(lambda: ledger.state.open)
        await ledger.append((record(1),))
        ledger.close(5)
        return away

    away = asyncio.run(work())
    assert (away.open, "file" in away.reason) == (False, True)


def test_a_ledger_that_another_process_has_locked_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "l"

    async def work() -> None:
        async with ledger_at(path) as ledger:
            await fill(ledger, count=10)
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as somebody:
                somebody.execute("BEGIN IMMEDIATE")
                with pytest.raises(LedgerError, match="locked"):
                    await ledger.append((record(10),))
                somebody.execute("ROLLBACK")
            await ledger.append((record(10),))
            assert ledger.state.open

    asyncio.run(work())
