"""The ledger of a running kvd under attack: damaged, deleted, flooded, asked too much. Each line happened before."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import wait as wait_all
from pathlib import Path

import pytest

from kvd.client.errors import ClientError, RefusedByDaemon
from kvd.client.operator import connect
from kvd.client.session import KvdSession
from kvd.wire.frame import encode
from kvd.wire.transfer import ListTransfers, ReportTransfers, TransferList
from tests.support.attacked import assert_unfelled, attacked, attacking
from tests.support.daemons import Daemon, daemons, facts, reporter, wait_for, worker
from tests.support.full_disk import no_file_beyond
from tests.support.ledgers import leaves, record, zero

LEDGER = "state/ledger.sqlite3"


def ledger_of(kvd: Daemon) -> Path:
    return kvd.directory / LEDGER


def ids(kvd: Daemon) -> list[str]:
    """Every record of the ledger, page by page."""
    found: list[str] = []
    before, more = 0, True
    while more:
        answer = kvd.ask(ListTransfers(limit=2000, before=before))
        assert isinstance(answer, TransferList)
        found += [row.record.transfer_id for row in answer.rows]
        before, more = answer.rows[-1].seq if answer.rows else 0, answer.more
    return found


def open_now(kvd: Daemon) -> bool:
    return kvd.status().gauges["ledger.open"] == 1.0


# --- numbers that are too large


def test_a_number_too_large_for_sqlite_hangs_nobody() -> None:
    """It ended the thread that reads; every later question hung."""
    with daemons() as (kvd,), reporter(kvd) as report:
        report(record(1))
        for after in (2**63, 2**64 - 1):
            with contextlib.suppress(RefusedByDaemon):
                kvd.ask(ListTransfers(after=after))
            with contextlib.suppress(RefusedByDaemon):
                kvd.ask(ListTransfers(before=after))
        assert ids(kvd) == ["t1"]


# --- files


def test_a_zeroed_page_costs_its_own_records_alone() -> None:
    """Everything was refused for ever, and nothing was set aside."""
    with daemons() as (kvd,), reporter(kvd) as report:
        for start in range(0, 2000, 100):
            report(*(record(n) for n in range(start, start + 100)))
        kvd.stop()
        at = leaves(ledger_of(kvd))
        zero(ledger_of(kvd), at[len(at) // 2])
        kvd.start()
        with attacked(kvd) as watch:
            with contextlib.suppress(RefusedByDaemon):
                ids(kvd)
            wait_for(lambda: "taken over" in kvd.log)
            report(record(5000))
        found = ids(kvd)
        assert len(found) == len(set(found)) >= 2001 - 20
        assert [p.name for p in ledger_of(kvd).parent.glob("*.broken-*") if p.suffix != ".db-wal"]
        assert_unfelled(watch.verdict())


def delete_files(path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink(missing_ok=True)


def delete_directory(path: Path) -> None:
    shutil.rmtree(path.parent, ignore_errors=True)


def replace_file(path: Path) -> None:
    path.with_name("mine").write_bytes(b"mine" * 5000)
    path.with_name("mine").rename(path)


@pytest.mark.parametrize("lose", [delete_files, delete_directory, replace_file])
def test_what_is_acknowledged_while_the_files_are_deleted_is_there_after_a_sigkill(
    lose: Callable[[Path], None],
) -> None:
    """155 of 1,000 acknowledged records were gone."""
    acknowledged: list[str] = []
    with daemons() as (kvd,), reporter(kvd) as report:
        with attacked(kvd) as watch:
            for number in range(1000):
                if number % 250 == 100:
                    lose(ledger_of(kvd))
                report(record(number))
                acknowledged.append(f"t{number}")
        kvd.kill()
        assert_unfelled(watch.verdict())
        kvd.start()
        wait_for(lambda: sorted(ids(kvd)) == sorted(acknowledged))


def test_files_deleted_while_nothing_is_reported_are_back_in_two_seconds() -> None:
    with daemons() as (kvd,), reporter(kvd) as report:
        report(*(record(n) for n in range(100)))
        delete_directory(ledger_of(kvd))
        wait_for(ledger_of(kvd).exists, 5.0)
        kvd.kill()
        kvd.start()
        assert len(ids(kvd)) == 100


# --- starts


def room_again(kvd: Daemon) -> None:
    resource.prlimit(kvd.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def full_disk(kvd: Daemon) -> None:
    with no_file_beyond(8192):
        kvd.start()


def no_directory(kvd: Daemon) -> None:
    state = ledger_of(kvd).parent
    state.rename(state.with_name("kept"))
    state.write_text("in its place")
    kvd.start()


def directory_again(kvd: Daemon) -> None:
    state = ledger_of(kvd).parent
    state.unlink()
    state.with_name("kept").rename(state)


@pytest.mark.parametrize(("spoil", "mend"), [(full_disk, room_again), (no_directory, directory_again)])
def test_a_kvd_whose_ledger_cannot_be_opened_serves_and_takes_records_once_it_can(
    spoil: Callable[[Daemon], None], mend: Callable[[Daemon], None]
) -> None:
    """kvd ended, or stayed ready with nobody to write: the whole control plane went with the ledger."""
    with daemons() as (kvd,):
        with reporter(kvd) as report:
            report(record(1))
        kvd.stop()
        spoil(kvd)
        card = worker(facts("d"))
        session = KvdSession(lambda: card, directory=kvd.directory)
        try:
            session.wait(lambda state: bool(state.engine_generation), 20)
            assert kvd.engines()["d"].state == "ready"
            assert kvd.status().ledger_away
            assert not open_now(kvd)
            kept = session.deliver(
                "k", ReportTransfers(incarnation=card.card.incarnation, records=(record(2),))
            )
            with pytest.raises(RefusedByDaemon) as refused:
                kvd.ask(ListTransfers())
            assert (refused.value.code, refused.value.refusal.final) == ("KVD-LEDGER", False)
            assert not kept.done()
            mend(kvd)
            kept.result(20)
            assert ids(kvd) == ["t2", "t1"]
            assert (open_now(kvd), kvd.status().ledger_away) == (True, "")
        finally:
            session.close()


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(50_000))


def first_query_fails(path: Path) -> None:
    zero(path, 0)


def of_a_newer_kvd(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version=99")


@pytest.mark.parametrize("spoil", [garbage, first_query_fails, of_a_newer_kvd])
def test_a_start_on_what_is_no_ledger_sets_it_aside(spoil: Callable[[Path], None]) -> None:
    with daemons() as (kvd,), reporter(kvd) as report:
        report(record(1))
        kvd.stop()
        spoil(ledger_of(kvd))
        before = ledger_of(kvd).stat().st_ino
        kvd.start()
        report(record(2))
        assert "t2" in ids(kvd)
        assert before in [p.stat().st_ino for p in ledger_of(kvd).parent.iterdir()], "nothing is deleted"
        assert "set aside" in kvd.log


def test_a_full_disk_while_it_runs_loses_nothing_and_delays_nobody() -> None:
    with daemons() as (kvd,), reporter(kvd) as report:
        report(record(1))
        soft = (8192, resource.RLIM_INFINITY)
        with attacked(kvd) as watch:
            resource.prlimit(kvd.pid, resource.RLIMIT_FSIZE, soft)
            with pytest.raises(ClientError):
                report(record(2), seconds=1.0)
            wait_for(lambda: not open_now(kvd))
            room_again(kvd)
            wait_for(lambda: open_now(kvd))
            report(record(2))
        kvd.kill()
        kvd.start()
        assert ids(kvd) == ["t2", "t1"]
        assert_unfelled(watch.verdict())


def test_a_second_kvd_with_the_same_state_directory_does_not_start() -> None:
    """Both ran. The lock's file may be deleted: that lets no second one in."""
    with daemons(2) as (first, second):
        second.stop()
        state = ledger_of(first).parent
        for delete in (False, True):
            if delete:
                (state / "ledger.lock").unlink()
            second.arguments = ("--state-dir", str(state))
            second.start(wait=False)
            assert second.process is not None
            assert second.process.wait(20) == 2
        told = second.log
        assert told.count(f"another kvd (process {first.pid}) keeps its ledger in {state}") == 2
        assert f"serves {first.directory}" in told
        assert open_now(first)


# --- too much of it


def report_much(directory: Path, engine: str) -> None:
    """Reports of a hundred records each, without waiting for answers, as fast as they can be sent."""
    card = worker(facts(engine))
    session = KvdSession(lambda: card, directory=directory)
    session.wait(lambda state: state.connected, 20)
    numbers = itertools.count()
    while True:
        futures = []
        for _ in range(50):
            records = tuple(record(next(numbers), engine=engine) for _ in range(100))
            futures.append(
                session.call(ReportTransfers(incarnation=card.card.incarnation, records=records), 30.0)
            )
        wait_all(futures, 30.0)


def test_a_busy_client_does_not_outgrow_the_rows() -> None:
    """354,000 rows with a bound of 20,000, and 344,000 after 25 s of rest."""
    with daemons() as (kvd,):
        kvd.stop()
        kvd.environment["KVD_LEDGER_MAX_ROWS"] = "2000"
        kvd.start()
        most = 0.0
        with attacked(kvd) as watch, attacking(report_much, kvd.directory, "busy"):
            wait_for(lambda: kvd.status().gauges["ledger.rows"] >= 2000.0, 20.0)
            ends = time.monotonic() + 2.0
            while time.monotonic() < ends:
                most = max(most, kvd.status().gauges["ledger.rows"])
        assert most <= 2000.0
        assert_unfelled(watch.verdict())


def ask_much(directory: Path) -> None:
    """Thousands of questions at a time, each of which looks at every record and finds none."""
    with connect(directory, 30.0) as operator:
        question = ListTransfers(any_id="", backend="none", order="slowest", limit=10_000)
        for number in itertools.count(1):
            operator._socket.send(encode(question, number))
            while operator._socket.poll(0 if number % 4200 else 1000):
                operator._socket.recv()


def test_one_clients_many_questions_delay_nobodys_records() -> None:
    """An innocent worker's records were KVD-BUSY 40 of 40."""
    with daemons() as (kvd,), reporter(kvd) as report:
        for start in range(0, 10_000, 100):
            report(*(record(n) for n in range(start, start + 100)))
        took = []
        with attacked(kvd) as watch, attacking(ask_much, kvd.directory):
            for number in range(40):
                began = time.monotonic()
                report(record(100_000 + number))
                took.append(time.monotonic() - began)
            asked = kvd.ask(ListTransfers(limit=5))
            assert isinstance(asked, TransferList)
            assert len(asked.rows) == 5
        assert max(took) < 2.0
        assert_unfelled(watch.verdict())
