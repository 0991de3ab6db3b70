"""What kvd asks of its ledger before it says that it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvd.service import self_check
from kvd.service.errors import LedgerError
from kvd.service.notify import Notifier
from kvd.service.runtime_directory import hold
from kvd.service.self_check import SelfCheck


async def answers(ledger: Callable[[], Awaitable[object]], times: int, folder: Path) -> list[bool]:
    """What so many checks of a ledger find."""

    async def ask(_seconds: float) -> object:
        return await ledger()

    with hold(folder) as directory:
        loop = asyncio.get_running_loop()
        check = SelfCheck(directory, Notifier(None, 0.03), loop=loop, ledger=ask)
        return [await asyncio.to_thread(check._ledger_answers) for _ in range(times)]


async def well() -> None:
    return


async def away() -> None:
    raise LedgerError("the disk is full")


async def hangs() -> None:
    await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "LEDGER_SECONDS", 0.05)


def test_a_ledger_that_says_why_it_cannot_be_used_answers(tmp_path: Path) -> None:
    assert asyncio.run(answers(well, 3, tmp_path / "d")) == [True] * 3
    assert asyncio.run(answers(away, 3, tmp_path / "d")) == [True] * 3


def test_one_that_hangs_after_it_was_well_does_not(tmp_path: Path) -> None:
    asked = 0

    async def once() -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            await hangs()

    found = asyncio.run(answers(once, 12, tmp_path / "d"))
    assert found[:3] == [True] * 3
    assert not any(found[-4:])


def test_one_that_never_answered_is_no_reason_to_end(tmp_path: Path) -> None:
    assert asyncio.run(answers(hangs, 12, tmp_path / "d")) == [True] * 12
