"""The ledger's bounds: rows and bytes at any load, age by a clock that can be trusted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from kvd.service.config import LedgerSettings
from kvd.service.ledger import pruning
from kvd.service.ledger.ledger import Ledger
from kvd.service.ledger.steady import SteadyClock
from kvd.wire.identity import EngineCard
from kvd.wire.transfer import ListTransfers
from tests.support.daemons import facts, worker
from tests.support.ledgers import fill, ledger_at, record, until

DAY = 86400.0


@dataclass
class Time:
    """Two clocks that a test sets while the ledger's thread reads them: both go on at once."""

    steady: float = 1000.0
    apart: float = 999_999_000.0
    seen: float = 1000.0

    @property
    def wall(self) -> float:
        return self.seen + self.apart

    def look(self) -> float:
        self.seen = self.steady  # and the wall clock of this moment is what is read next
        return self.seen

    def clock(self) -> SteadyClock:
        return SteadyClock(lambda: self.wall, self.look)

    def go_on(self, seconds: float) -> None:
        self.steady += seconds

    def set_by(self, seconds: float) -> None:
        self.apart += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    """What the ledger goes by; its bounds are looked at after each commit."""
    made = Time()
    monkeypatch.setattr(pruning, "SECONDS", 0.0)
    monkeypatch.setattr(pruning, "time", SimpleNamespace(monotonic=lambda: made.steady))
    return made


def test_a_busy_ledger_stays_within_its_rows(tmp_path: Path) -> None:
    most = 0

    async def work() -> None:
        nonlocal most
        async with ledger_at(tmp_path / "l", LedgerSettings(max_rows=500)) as ledger:
            for start in range(0, 6000, 1000):
                await asyncio.gather(*(ledger.append((record(n),)) for n in range(start, start + 1000)))
                most = max(most, ledger.state.rows)

    asyncio.run(work())
    assert most == 500


def test_a_ledger_whose_bounds_were_lowered_shrinks_while_it_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "ROWS", 100)
    monkeypatch.setattr(pruning, "SECONDS", 0.2)

    async def work() -> None:
        async with ledger_at(tmp_path / "l") as ledger:
            await fill(ledger, count=1500)
            ledger.settings = LedgerSettings(max_rows=100)
            await until(lambda: ledger.state.rows == 100)
            assert len((await ledger.select(ListTransfers(limit=200))).rows) == 100

    asyncio.run(work())


def test_descriptions_of_engines_push_no_records_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "SECONDS", 0.0)
    monkeypatch.setattr(pruning, "AGE_SECONDS", 0.0)
    size = 2_000_000

    async def work() -> None:
        async with ledger_at(tmp_path / "l", LedgerSettings(max_bytes=size)) as ledger:
            await ledger.append((record(1),))
            for number in range(40):
                named = msgspec.structs.replace(record(2 + number), remote_engine=f"e{number}")
                await ledger.append((named,), (card(f"e{number}", 100_000),))
            await until(lambda: len(ledger.known) <= 5)
            assert ("e39", "g") in ledger.known, "those that were named last stay"
            assert ledger.state.rows == 41

    asyncio.run(work())


def card(engine_id: str, size: int) -> EngineCard:
    one = msgspec.structs.replace(worker(facts(engine_id)).card, geometry=bytes(size))
    return EngineCard(engine=facts(engine_id), generation="g", workers=(one,))


def test_old_records_go_by_and_by(tmp_path: Path, time: Time) -> None:
    async def work() -> None:
        ledger = Ledger(tmp_path / "l", LedgerSettings(), clock=time.clock())
        await fill(ledger, count=1000)
        time.go_on(15 * DAY)
        await ledger.append((record(9999),))
        for left in range(991, 0, -10):
            while ledger.state.rows > left:  # a part goes after a commit, which is answered before
                await ledger.append(())
            await ledger.append(())
            await ledger.append(())
            assert ledger.state.rows == left, "never more than a bounded part at a time"
            time.go_on(pruning.AGE_SECONDS)
        assert ledger.state.rows == 1
        ledger.close(5)

    asyncio.run(work())


@pytest.mark.parametrize("lasts", [10.0, 600.0, 3000.0])
def test_a_clock_that_is_two_weeks_ahead_for_a_time_costs_no_record(
    tmp_path: Path, time: Time, lasts: float
) -> None:
    async def work() -> None:
        ledger = Ledger(tmp_path / "l", LedgerSettings(), clock=time.clock())
        await fill(ledger, count=500)

        async def hours(seconds: float) -> None:
            for _ in range(20):
                time.go_on(seconds / 20)
                await ledger.append(())

        await hours(4 * 3600.0)
        time.set_by(15 * DAY)
        await hours(lasts)
        await ledger.append((record(1000),))
        time.set_by(-15 * DAY)
        await hours(4 * 3600.0)
        assert ledger.state.rows == 501
        ledger.close(5)

    asyncio.run(work())


def test_a_kvd_that_starts_under_a_wrong_clock_waits(tmp_path: Path, time: Time) -> None:
    async def work() -> int:
        ledger = Ledger(tmp_path / "l", LedgerSettings(), clock=time.clock())
        await ledger.append((record(1), record(2)))
        await ledger.append(())
        rows = ledger.state.rows
        ledger.close(5)
        return rows

    asyncio.run(work())
    time.set_by(400 * DAY)
    assert asyncio.run(work()) == 2


@pytest.mark.parametrize("by", [-15 * DAY, -61.0, 61.0, 15 * DAY])
def test_a_clock_that_was_set_is_not_steady(by: float) -> None:
    time = Time()
    clock = time.clock()
    assert clock.look()[1] == 0.0
    time.go_on(100.0)
    time.set_by(0.1)  # NTP
    assert clock.look()[1] == 100.0
    time.set_by(by)
    assert clock.look()[1] == 0.0
    time.go_on(50.0)
    assert clock.look()[1] == 50.0
