"""The ledger's threads: a job costs itself, a long question is cut short, and a thread's end is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvd.service.config import LedgerSettings
from kvd.service.errors import LedgerError, RequestRefused
from kvd.service.ledger import ledger as module
from kvd.service.ledger.jobs import LedgerClient
from kvd.service.ledger.ledger import Ledger
from kvd.wire.transfer import ListTransfers
from tests.support.ledgers import fill, ledger_at, record, round_trip, until

Work = Callable[[sqlite3.Connection], Any]

SLOW = """
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000000000) SELECT max(i) FROM n
"""
"""Minutes of SQLite's work."""


def raising(error: BaseException) -> Work:
    def work(_database: sqlite3.Connection) -> None:
        raise error

    return work


def too_large(database: sqlite3.Connection) -> None:
    database.execute("SELECT ?", (2**64 - 1,))


def too_deep(_database: sqlite3.Connection) -> None:
    too_deep(_database)


def too_few(database: sqlite3.Connection) -> None:
    database.execute("SELECT ?", ())


def unknown_type(database: sqlite3.Connection) -> None:
    database.execute("SELECT ?", (object(),))


BAD = [too_large, too_deep, too_few, unknown_type, raising(MemoryError()), raising(KeyError("x"))]


@pytest.mark.parametrize("after", [2**64 - 1, -(2**70), 2**63])
def test_numbers_that_sqlite_does_not_take_are_numbers_all_the_same(tmp_path: Path, after: int) -> None:
    async def work() -> None:
        async with ledger_at(tmp_path / "l") as ledger:
            await fill(ledger, count=3)
            found = await ledger.select(ListTransfers(after=after))
            assert len(found.rows) == (3 if after < 0 else 0)
            assert len((await ledger.select(ListTransfers(before=after))).rows) == (0 if after < 0 else 3)

    asyncio.run(work())


@pytest.mark.parametrize("bad", BAD)
def test_a_question_that_raises_costs_that_question(
    tmp_path: Path, bad: Work, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with ledger_at(tmp_path / "l") as ledger:
            for _ in range(3):
                with pytest.raises(LedgerError) as refused:
                    await ledger._ask(ledger._reader.jobs, bad, LedgerClient(), 1)
                assert (refused.value.code, refused.value.final) == ("KVD-LEDGER", False)
                await ledger.select(ListTransfers())
            await round_trip(ledger, 5.0)

    asyncio.run(work())
    told = [r for r in caplog.records if "one job is lost" in r.getMessage()]
    assert len(told) == 1, "with its cause, and not a thousand times"
    assert told[0].exc_info


@pytest.mark.parametrize("bad", BAD)
def test_a_report_that_raises_costs_that_report_and_not_its_batch(tmp_path: Path, bad: Work) -> None:
    async def work() -> None:
        async with ledger_at(tmp_path / "l") as ledger:

            def half(database: sqlite3.Connection) -> None:
                ledger._writer.write(database, (record(77),), ())
                bad(database)

            results = await asyncio.gather(
                ledger.append((record(1),)),
                ledger._ask(ledger._writer.jobs, half, LedgerClient(), 1),
                ledger.append((record(2),)),
                return_exceptions=True,
            )
            assert [isinstance(result, LedgerError) for result in results] == [False, True, False]
            rows = (await ledger.select(ListTransfers())).rows
            assert {row.record.transfer_id for row in rows} == {"t1", "t2"}
            assert ledger.state.open

    asyncio.run(work())


def test_a_long_question_is_refused_and_delays_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONG_SECONDS", 1.5)
    hostile, honest = LedgerClient(b"hostile", 1), LedgerClient(b"honest", 2)

    async def work() -> None:
        async with ledger_at(tmp_path / "l") as ledger:
            await fill(ledger, count=10)
            slow = [
                asyncio.ensure_future(
                    ledger._ask(ledger._reader.jobs, lambda d: d.execute(SLOW).fetchone(), hostile, 1)
                )
                for _ in range(4)
            ]
            await asyncio.sleep(0)
            took = []
            for number in range(10):
                began = time.monotonic()
                await ledger.select(ListTransfers(), honest)
                await ledger.append((record(100 + number),), (), honest)
                took.append(time.monotonic() - began)
            assert max(took) < 1.0, (
                "it waits for one question of the other, a quarter of a second, not for four"
            )
            refused = await asyncio.gather(*slow, return_exceptions=True)
            codes = [error.code for error in refused if isinstance(error, RequestRefused)]
            assert sorted(codes) == ["KVD-BUSY"] + 3 * ["KVD-QUESTION-TOO-LONG"]
            assert all(
                "narrow" in e.hint for e in refused if isinstance(e, RequestRefused) and "LONG" in e.code
            )

    asyncio.run(work())


def test_a_thread_that_ends_is_noticed_and_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        ledger = Ledger(tmp_path / "l", LedgerSettings())
        await ledger.opened

        def end(*_: object) -> None:
            raise SystemExit

        monkeypatch.setattr(ledger._reader, "_result", end)
        with pytest.raises(LedgerError, match="has ended"):
            async with asyncio.timeout(5.0):
                await ledger.select(ListTransfers())
        with pytest.raises(RuntimeError, match="kvd-ledger-reader has ended"):
            await ledger.ended  # which ends kvd
        for question in (ledger.select(ListTransfers()), ledger.append((record(1),))):
            with pytest.raises(LedgerError, match="has ended"):
                await question
        ledger.close(5)

    asyncio.run(work())


def test_a_round_trip_is_past_all_that_waits(tmp_path: Path) -> None:
    async def work() -> None:
        async with ledger_at(tmp_path / "l") as ledger:
            many = [tuple(record(n) for n in range(1000 * i, 1000 * i + 500)) for i in range(20)]
            waiting = [
                asyncio.ensure_future(ledger.append(records, (), LedgerClient(b"%d" % n)))
                for n, records in enumerate(many)
            ]
            await asyncio.sleep(0)
            state = await round_trip(ledger, 5.0)
            assert state.open
            assert not all(task.done() for task in waiting)
            await asyncio.gather(*waiting)

    asyncio.run(work())


def test_a_round_trip_through_a_thread_that_is_stuck_fails(tmp_path: Path) -> None:
    async def work() -> None:
        async with ledger_at(tmp_path / "l") as ledger:
            goes_on = threading.Event()
            stuck = asyncio.ensure_future(
                ledger._ask(ledger._writer.jobs, lambda _: goes_on.wait(30), LedgerClient(), 1)
            )
            await asyncio.sleep(0)
            with pytest.raises(TimeoutError):
                await round_trip(ledger, 0.1)
            goes_on.set()
            await stuck
            await round_trip(ledger, 5.0)

    asyncio.run(work())


def test_what_waits_at_the_end_is_written(tmp_path: Path) -> None:
    async def work() -> None:
        ledger = Ledger(tmp_path / "l", LedgerSettings())
        reports = [asyncio.ensure_future(ledger.append((record(n),))) for n in range(100)]
        await asyncio.sleep(0)
        ledger.close(10)
        await asyncio.gather(*reports)

    asyncio.run(work())
    with contextlib.closing(sqlite3.connect(tmp_path / "l")) as database:
        assert database.execute("SELECT count(*) FROM transfers").fetchone() == (100,)


def test_somebody_elses_transaction_that_was_left_open_is_healed(tmp_path: Path) -> None:
    async def work() -> None:
        async with ledger_at(tmp_path / "l") as ledger:
            with contextlib.suppress(LedgerError):
                await ledger._ask(ledger._writer.jobs, lambda d: d.execute("COMMIT"), LedgerClient(), 1)
            await until(lambda: ledger.state.open)
            await ledger.append((record(1),))

    asyncio.run(work())
