"""A ledger whose files are damaged, gone, full or not ours: kvd goes on, and what was acknowledged is there once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvd.service.config import LedgerSettings
from kvd.service.errors import LedgerError
from kvd.service.ledger import salvage, store, writer
from kvd.service.ledger.ledger import Ledger
from kvd.service.ledger.state import LedgerState
from kvd.wire.transfer import ListTransfers
from tests.kvd.service.ledger.test_ledger import record
from tests.support.full_disk import no_file_beyond

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


async def fill(ledger: Ledger, first: int = 0, count: int = MANY) -> None:
    for start in range(first, first + count, 500):
        await ledger.append(tuple(record(n) for n in range(start, min(start + 500, first + count))))


def names(path: Path) -> set[str]:
    """What lies beside the ledger, without times and SQLite's own files."""
    return {p.name.partition("-")[0] for p in path.parent.iterdir() if not p.name.endswith(("-wal", "-shm"))}


def filled(path: Path) -> None:
    async def work() -> None:
        async with ledger_at(path) as ledger:
            await fill(ledger)

    asyncio.run(work())


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
                await asyncio.wait_for(ledger.round_trip(5.0), 5.0)
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
            await ledger.round_trip(5.0)
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


def test_a_row_that_cannot_be_decoded_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "l"

    async def work() -> None:
        async with ledger_at(path) as ledger:
            await fill(ledger, count=10)
            with contextlib.closing(sqlite3.connect(path)) as database, database:
                database.execute("UPDATE transfers SET record = x'00' WHERE seq = 5")
            assert len(await all_ids(ledger)) == 9

    asyncio.run(work())
