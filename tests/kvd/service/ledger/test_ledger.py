"""The ledger: what was acknowledged is on disk, whatever happens to kvd, and it stays within its bounds."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from pathlib import Path

import msgspec
import pytest

from kvd.client.errors import ClientError
from kvd.service.config import LedgerSettings
from kvd.service.ledger import query, store
from kvd.service.ledger.ledger import Ledger
from kvd.service.ledger.query import Own
from kvd.wire.names import generation_of
from kvd.wire.reply import Ok
from kvd.wire.transfer import (
    MAX_CAUSE,
    MAX_RUNS,
    BlockRuns,
    GetKeptEngine,
    KeptEngine,
    ListTransfers,
    ReportTransfers,
    TransferList,
    TransferRecord,
)
from tests.support.daemons import daemons, facts, geometry, measured, reporter, session, wait_for, worker
from tests.support.ledgers import record


def test_acknowledged_records_survive_a_sigkill_right_after() -> None:
    with daemons() as (kvd,), reporter(kvd) as report:
        for round_ in range(3):
            assert report(*(record(100 * round_ + n) for n in range(100))) == Ok()
            kvd.kill()
            kvd.start()
            found = kvd.ask(ListTransfers(limit=1000))
            assert isinstance(found, TransferList)
            assert found.total == len(found.rows) == 100 * (round_ + 1)


def test_a_sigkill_amid_reports_loses_nothing_that_was_acknowledged() -> None:
    with daemons() as (kvd,), reporter(kvd) as report:
        acknowledged: list[str] = []
        enough, killed = threading.Event(), threading.Event()

        def report_on() -> None:
            number = 0
            while not killed.is_set():
                number += 1
                with contextlib.suppress(ClientError):
                    report(record(number), seconds=2.0)
                    acknowledged.append(f"t{number}")
                if len(acknowledged) > 50:
                    enough.set()

        reporting = threading.Thread(target=report_on)
        reporting.start()
        assert enough.wait(60)
        kvd.kill()
        killed.set()
        kvd.start()
        reporting.join(60)
        found = kvd.ask(ListTransfers(limit=10_000))
        assert isinstance(found, TransferList)
        assert set(acknowledged) <= {row.record.transfer_id for row in found.rows}
        assert "set aside" not in kvd.log


def test_records_that_come_twice_are_kept_and_counted_once() -> None:
    with daemons() as (kvd,), reporter(kvd) as report:
        for _ in range(2):
            report(record(1), record(2, "miss"))
        found = kvd.ask(ListTransfers())
        assert isinstance(found, TransferList)
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
        assert await ids(ListTransfers(before=3)) == ["t2", "t1"]
        assert await ids(ListTransfers(engine_id="p", peer="other")) == ["t3"]
        assert await ids(ListTransfers(peer="p", mode="push")) == []
        assert await ids(ListTransfers(backend="nixl")) == []
        for any_id in ("t2", "r2", "p2", "2"):
            assert await ids(ListTransfers(any_id=any_id)) == ["t2"]
        assert await ids(ListTransfers(any_id="9" * 30)) == []
        assert await ids(ListTransfers(within=60)) == ["t3", "t2", "t1"]
        assert await ids(ListTransfers(within=1e-9)) == []
        assert await ids(ListTransfers(slower_than=0.5)) == []
        assert (await ledger.select(ListTransfers(limit=2))).more
        assert not (await ledger.select(ListTransfers(limit=3))).more
        ledger.close(5)

    asyncio.run(work())


def test_records_beyond_the_rows_go_with_the_commit_that_brings_others(tmp_path: Path) -> None:
    async def work() -> None:
        ledger = Ledger(tmp_path / "l", LedgerSettings(max_rows=3))
        for number in range(0, 100, 10):
            await ledger.append(tuple(record(n) for n in range(number, number + 10)))
            assert ledger.state.rows == 3
        rows = (await ledger.select(ListTransfers())).rows
        assert [row.record.transfer_id for row in rows] == ["t99", "t98", "t97"]
        ledger.close(5)

    asyncio.run(work())


def test_slowest_and_largest_first(tmp_path: Path) -> None:
    slow = msgspec.structs.replace(record(1), stages={"post": 0.5, "wire": 0.5})
    large = msgspec.structs.replace(record(2), bytes=100, stages={"wire": 0.1})

    async def work() -> None:
        ledger = Ledger(tmp_path / "l", LedgerSettings())
        await ledger.append((slow, large, record(3)))
        for order, first in (("newest", "t3"), ("slowest", "t1"), ("largest", "t2")):
            rows = (await ledger.select(ListTransfers(order=order))).rows  # type: ignore[arg-type]
            assert rows[0].record.transfer_id == first
        assert len((await ledger.select(ListTransfers(slower_than=0.5))).rows) == 1
        ledger.close(5)

    asyncio.run(work())


def test_block_ids_come_when_asked_for_and_are_cut_where_there_are_too_many(tmp_path: Path) -> None:
    few = (BlockRuns(0, 0, ((1, 3), (9, 1))),)
    many = (BlockRuns(0, 0, ((1, 1),)), BlockRuns(1, 2, tuple((n, 1) for n in range(0, 4 * MAX_RUNS, 2))))
    records = (
        msgspec.structs.replace(record(1), local_blocks=few, remote_blocks=few),
        msgspec.structs.replace(record(2), local_blocks=many, remote_blocks=few, cause="x" * 2 * MAX_CAUSE),
    )

    async def work() -> None:
        ledger = Ledger(tmp_path / "l", LedgerSettings())
        await ledger.append(records)
        bare = (await ledger.select(ListTransfers())).rows
        assert [row.record.local_blocks for row in bare] == [(), ()]
        cut, whole = (row.record for row in (await ledger.select(ListTransfers(blocks=True))).rows)
        assert whole == records[0]
        assert (cut.blocks_cut, cut.remote_blocks, len(cut.cause)) == (True, few, MAX_CAUSE)
        assert [len(part.runs) for part in cut.local_blocks] == [1, MAX_RUNS - 1]
        ledger.close(5)

    asyncio.run(work())


def test_figures_that_no_database_takes_do_not_stop_the_ledger(tmp_path: Path) -> None:
    odd = msgspec.structs.replace(record(1), bytes=2**64 - 1, stages={"wire": float("nan")})

    async def work() -> None:
        ledger = Ledger(tmp_path / "l", LedgerSettings())
        assert len(await ledger.append((odd,))) == 1  # the wire lets none of these through
        assert len(await ledger.append((record(2),))) == 1
        ledger.close(5)

    asyncio.run(work())


def test_an_answer_stays_within_what_a_message_may_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.service.ledger.query.MAX_ANSWER", 1000)

    async def work() -> None:
        ledger = Ledger(tmp_path / "l", LedgerSettings())
        await ledger.append(tuple(record(n) for n in range(20)))
        seen: list[int] = []
        before, more = 0, True
        while more:
            found = await ledger.select(ListTransfers(before=before))
            seen += [row.seq for row in found.rows]
            before, more = seen[-1], found.more
            assert len(found.rows) < 10
        assert seen == list(range(20, 0, -1))
        ledger.close(5)

    asyncio.run(work())


def test_bytes_bound_the_ledger_as_well(tmp_path: Path) -> None:
    blocks = (BlockRuns(0, 0, tuple((n, 1) for n in range(0, 2 * MAX_RUNS, 2))),)

    async def work() -> None:
        ledger = Ledger(tmp_path / "l", LedgerSettings(max_bytes=1_000_000))
        for start in range(0, 200, 10):
            big = (msgspec.structs.replace(record(n), local_blocks=blocks) for n in range(start, start + 10))
            await ledger.append(tuple(big))
            ledger._writer._pruning.hurry()
            await ledger.append(())
        ledger.close(5)

    asyncio.run(work())
    assert (tmp_path / "l").stat().st_size < 2_000_000


def test_what_is_known_of_an_engine_is_kept_as_long_as_records_name_it() -> None:
    engine = facts("d", tp=2)
    with daemons() as (kvd,):
        with session(kvd, worker(engine, 0, "i0")), session(kvd, worker(engine, 1, "i1")):
            wait_for(lambda: kvd.engines()["d"].state == "ready")
            kvd.ask(ReportTransfers(incarnation="i0", records=(record(1),)))
        kvd.kill()
        kvd.start()
        found = kvd.ask(ListTransfers())
        assert isinstance(found, TransferList)
        generation = found.rows[0].record.local_generation
        assert generation == generation_of(("i0", "i1"))
        kept = kvd.ask(GetKeptEngine(engine_id="d", generation=generation))
        assert isinstance(kept, KeptEngine)
        assert kept.geometries == (geometry(0), geometry(1))
        assert kept.engine.facts == {"backend": "direct"}
        assert kvd.ask_refused(GetKeptEngine(engine_id="p", generation="g")).code == "KVD-NO-ENGINE"


OLD = """
CREATE TABLE transfers (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, transfer_id TEXT NOT NULL, request_id TEXT NOT NULL,
    remote_request_id TEXT NOT NULL, local_engine TEXT NOT NULL, local_rank TEXT NOT NULL, remote_engine TEXT NOT NULL,
    state TEXT NOT NULL, recorded REAL NOT NULL, record BLOB NOT NULL, UNIQUE (transfer_id, local_engine, local_rank));
CREATE INDEX by_request ON transfers (request_id);
"""


def test_a_ledger_of_the_first_schema_goes_over_whole(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "l") as database:
        database.executescript(OLD)
        for n in range(5):
            blob = msgspec.msgpack.encode(record(n))
            values = (f"t{n}", f"r{n}", "p", "d", "tp0", "p", "done", time.time(), blob)
            database.execute("INSERT INTO transfers VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
    database.close()

    async def work() -> None:
        ledger = Ledger(tmp_path / "l", LedgerSettings())
        await ledger.opened
        rows = (await ledger.select(ListTransfers(backend="direct"))).rows
        assert [row.record for row in reversed(rows)] == [record(n) for n in range(5)]
        ledger.close(5)

    asyncio.run(work())


COLUMNS = {"code": "    code TEXT NOT NULL DEFAULT '',\n", "uid": "    uid INTEGER,\n"}
"""The columns that came last, in their order: a schema before them was the one of today without."""


def make_older(path: Path, version: int, records: tuple[TransferRecord, ...]) -> None:
    """A ledger as a kvd of schema 1 or 2 left it."""
    tables, insert, missing = store._TABLES, store._INSERT, list(COLUMNS)[version - 1 :]
    for name in missing:
        tables, insert = (
            tables.replace(COLUMNS[name], ""),
            insert.replace(f", {name}", "").replace(", ?)", ")"),
        )
    with sqlite3.connect(path) as database:
        database.executescript(tables)
        assert not {row[1] for row in database.execute("PRAGMA table_info(transfers)")} & set(missing)
        for one in records:
            database.execute(insert, (None, *store.row(one, time.time())[: -len(missing)]))
        database.execute(f"PRAGMA user_version={version}")
    database.close()


def test_a_ledger_without_codes_gets_them_and_keeps_its_records(tmp_path: Path) -> None:
    make_older(tmp_path / "l", 1, tuple(record(n, "miss") for n in range(3)))

    async def work() -> None:
        for _ in range(2):  # the second time there is nothing left to do
            ledger = Ledger(tmp_path / "l", LedgerSettings())
            await ledger.opened
            rows = (await ledger.select(ListTransfers())).rows
            assert [row.record.transfer_id for row in rows][-3:] == ["t2", "t1", "t0"]
            await ledger.append((msgspec.structs.replace(record(9, "miss"), code="TOO_LATE"),))
            (late,) = (await ledger.select(ListTransfers(code="TOO_LATE"))).rows
            assert late.record.transfer_id == "t9"
            ledger.close(5)

    asyncio.run(work())


@pytest.mark.parametrize("version", [1, 2, store.SCHEMA])
def test_who_sees_his_own_records_sees_those_of_an_older_ledger_too(tmp_path: Path, version: int) -> None:
    """Two users had an engine of the same id, one after the other."""
    mine, theirs = (
        tuple(msgspec.structs.replace(record(n), uid=uid) for n in range(uid, uid + 3)) for uid in (100, 200)
    )
    if version < store.SCHEMA:
        make_older(tmp_path / "l", version, mine[:2] + theirs)

    async def work() -> None:
        ledger = Ledger(tmp_path / "l", LedgerSettings())
        await ledger.append(mine + theirs + (msgspec.structs.replace(record(1, engine="other"), uid=100),))
        for limit, more in ((10, False), (2, True)):
            found = await ledger.select(ListTransfers(limit=limit), own=Own(100, frozenset({"d"})))
            assert [row.record for row in found.rows] == sorted(mine, key=lambda r: r.transfer_id)[::-1][
                :limit
            ]
            assert (found.hidden, found.more) == (1, more), "of others' engines"
        ledger.close(5)

    asyncio.run(work())


def test_nobody_sees_another_users_records_of_an_engine_that_is_his_by_name_and_none_is_decoded_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tuple(msgspec.structs.replace(record(n), uid=200) for n in range(50))

    async def work() -> None:
        ledger = Ledger(tmp_path / "l", LedgerSettings())
        await ledger.append(theirs)
        monkeypatch.setattr(query, "decode_record", lambda _: pytest.fail("a record was decoded"))
        found = await ledger.select(ListTransfers(), own=Own(100, frozenset({"d"})))
        assert found.rows == ()
        ledger.close(5)

    asyncio.run(work())


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
