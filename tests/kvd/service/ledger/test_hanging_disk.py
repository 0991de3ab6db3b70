"""The ledger's disk hangs: kvd says so and goes on, and so it does where it hangs from the start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.service.config import LedgerSettings
from kvd.service.errors import LedgerError
from kvd.service.ledger import ledger as module
from kvd.service.ledger import lock
from kvd.service.ledger.jobs import LedgerClient
from kvd.service.ledger.ledger import Ledger
from kvd.wire.transfer import ListTransfers
from tests.support.ledgers import ledger_at, record, until


@contextlib.contextmanager
def watched(ledger: Ledger) -> Iterator[None]:
    """As kvd watches it."""
    watching = asyncio.get_running_loop().create_task(ledger.watch())
    try:
        yield
    finally:
        watching.cancel()


def test_a_disk_that_hangs_is_told_and_the_ledger_is_away_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.01)
    answers = threading.Event()

    async def work() -> None:
        async with ledger_at(tmp_path / "l") as ledger:
            with watched(ledger):
                hangs = asyncio.ensure_future(
                    ledger._ask(ledger._writer.jobs, lambda _: answers.wait(10), LedgerClient(), 1)
                )
                await until(lambda: not ledger.state.open)
                assert "its disk has not answered for" in ledger.state.reason
                for question in (ledger.append((record(1),)), ledger.select(ListTransfers())):
                    with pytest.raises(LedgerError, match="has not answered") as refused:
                        await question
                    assert not refused.value.final
                monkeypatch.setattr(
                    module, "SILENT_SECONDS", 60.0
                )  # this machine's own disk may take its time
                answers.set()
                await hangs
                await until(lambda: ledger.state.open)
                await ledger.append((record(1),))
                assert not ledger.ended.done()

    with caplog.at_level(logging.WARNING):
        asyncio.run(work())
    told = [record.getMessage() for record in caplog.records]
    assert ["kvd serves on" in told[0], "answers again" in told[1], len(told)] == [True, True, 2]


def test_a_disk_that_hangs_from_the_start_keeps_kvd_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEGIN_SECONDS", 0.05)
    answers, take = threading.Event(), lock.take

    def hanging(directory: Path, runtime: str) -> lock.StateLock:
        answers.wait(10)
        return take(directory, runtime)

    monkeypatch.setattr(lock, "take", hanging)

    async def work() -> None:
        ledger = Ledger(tmp_path / "l", LedgerSettings())
        async with asyncio.timeout(5):
            await ledger.begun()
        assert not ledger.state.open
        answers.set()
        await until(lambda: ledger.state.open)
        await ledger.append((record(1),))
        ledger.close(5)

    asyncio.run(work())
