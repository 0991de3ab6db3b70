"""The ledger: what was acknowledged is on disk, whatever happens to kvd, and it stays within its bounds."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

import pytest

from kvd.service.config import LedgerSettings
from kvd.service.errors import LedgerError
from kvd.service.ledger import Ledger, open_database
from kvd.wire.reply import Ok
from kvd.wire.transfer import ListTransfers, ReportTransfers, TransferRecord, Transfers
from tests.support.daemons import daemons, measured


def record(number: int, state: str = "done", engine: str = "d") -> TransferRecord:
    return TransferRecord(
        transfer_id=f"t{number}", request_id=f"r{number}", local_engine=engine, local_rank="tp0", remote_engine="p",
        remote_generation="g", remote_request_id=f"p{number}", backend="direct", mode="pull", bytes=10,
        state="miss" if state == "miss" else "done",
    )  # fmt: skip


def test_acknowledged_records_survive_a_sigkill_right_after() -> None:
    with daemons() as (kvd,):
        for round_ in range(3):
            records = tuple(record(100 * round_ + n) for n in range(100))
            assert kvd.ask(ReportTransfers(incarnation="i", records=records)) == Ok()
            kvd.kill()
            kvd.start()
            found = kvd.ask(ListTransfers(limit=1000))
            assert isinstance(found, Transfers)
            assert found.total == len(found.rows) == 100 * (round_ + 1)


def test_records_that_come_twice_are_kept_and_counted_once() -> None:
    with daemons() as (kvd,):
        for _ in range(2):
            kvd.ask(ReportTransfers(incarnation="i", records=(record(1), record(2, "miss"))))
        found = kvd.ask(ListTransfers())
        assert isinstance(found, Transfers)
        assert found.total == 2
        counters = kvd.status().counters
        assert (counters["transfers.done"], counters["transfers.miss"], counters["transfers.bytes"]) == (
            1,
            1,
            10,
        )
        assert counters["events.transfer.miss"] == 1


def test_filters(tmp_path: Path) -> None:
    async def work() -> None:
        ledger = Ledger(tmp_path / "l", LedgerSettings())
        await ledger.append((record(1), record(2, "miss"), record(3, engine="other")))

        async def ids(query: ListTransfers) -> list[str]:
            return [row.record.transfer_id for row in (await ledger.select(query)).rows]

        assert await ids(ListTransfers()) == ["t3", "t2", "t1"]
        assert await ids(ListTransfers(limit=1)) == ["t3"]
        assert await ids(ListTransfers(limit=-1)) == []
        assert await ids(ListTransfers(after=2)) == ["t3"]
        assert await ids(ListTransfers(request_id="r2")) == ["t2"]
        assert await ids(ListTransfers(request_id="p2")) == ["t2"]
        assert await ids(ListTransfers(engine_id="other")) == ["t3"]
        assert await ids(ListTransfers(engine_id="p", state="miss")) == ["t2"]
        ledger.close(5)

    asyncio.run(work())


@pytest.mark.parametrize("settings", [LedgerSettings(max_rows=3), LedgerSettings(max_age_seconds=0.000001)])
def test_old_records_are_dropped(tmp_path: Path, settings: LedgerSettings) -> None:
    async def fill(number: int) -> int:
        ledger = Ledger(tmp_path / "l", settings)
        await ledger.append(tuple(record(n) for n in range(number, number + 10)))
        ledger.close(5)
        with sqlite3.connect(tmp_path / "l") as database:
            left = int(database.execute("SELECT count(*) FROM transfers").fetchone()[0])
        database.close()
        return left

    assert asyncio.run(fill(0)) == (3 if settings.max_rows == 3 else 0)


def test_a_damaged_file_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "l").write_bytes(b"no database at all" * 1000)
    open_database(tmp_path / "l").close()
    assert [p.name.split("-")[0] for p in tmp_path.glob("l.broken*")] == ["l.broken"]


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match=f"{tmp_path}/file/l cannot be opened"):
        open_database(tmp_path / "file" / "l")


def test_a_thousand_reports_at_a_time_share_commits(tmp_path: Path) -> None:
    async def work() -> float:
        ledger = Ledger(tmp_path / "l", LedgerSettings())
        began = time.monotonic()
        await asyncio.gather(*(ledger.append((record(n),)) for n in range(1000)))
        seconds = time.monotonic() - began
        assert (await ledger.select(ListTransfers(limit=1))).total == 1000
        ledger.close(5)
        return seconds

    measured("1000 reports on disk", asyncio.run(work()))
