"""One state directory, one kvd."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvd.service.config import LedgerSettings
from kvd.service.errors import LedgerError, StartError
from kvd.service.ledger import lock
from kvd.service.ledger.ledger import Ledger
from tests.support.ledgers import ledger_at, record, until

HOLDER = """
import sys
from pathlib import Path
from kvd.service.ledger.lock import take
lock = take(Path(sys.argv[1]), "/run/first")
print("locked", flush=True)
"""
ENDED = """
import ctypes, os, threading
end = threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)))
end.start()
ctypes.CDLL(None).pthread_exit(None)
"""
"""Then its first thread ends, and another one goes on for a while."""


@contextmanager
def holder(directory: Path, then: str = "sys.stdin.read()") -> Iterator[int]:
    """Another process that has the lock."""
    held = subprocess.Popen(
        [sys.executable, "-c", HOLDER + then, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert held.stdout is not None
        assert held.stdout.readline() == "locked\n"
        yield held.pid
    finally:
        held.communicate()


def test_a_second_one_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    with holder(tmp_path) as pid:
        words = f"process {pid}.* keeps its ledger in {tmp_path} and serves /run/first"
        with pytest.raises(StartError, match=words) as error:
            lock.take(tmp_path, "/run/second")
        assert "--state-dir" in error.value.hint
    lock.take(tmp_path, "/run/second").release()


def test_deleting_the_locks_file_lets_no_second_one_in(tmp_path: Path) -> None:
    with holder(tmp_path) as pid:
        (tmp_path / lock.NAME).unlink()
        with pytest.raises(StartError, match=f"process {pid}"):
            lock.take(tmp_path, "/run/second")


def test_the_file_is_for_kvds_own_user(tmp_path: Path) -> None:
    taken = lock.take(tmp_path, "")
    assert (tmp_path / lock.NAME).stat().st_mode & 0o777 == 0o600
    taken.release()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_who_locks_the_directory_keeps_nobody_away() -> None:
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        stranger = subprocess.Popen(
            ["flock", place, "sh", "-c", "echo locked; cat"],
            user=65534,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "locked\n"
            lock.take(Path(place), "").release()
        finally:
            stranger.communicate()


def test_a_ledger_takes_its_lock_again_where_the_file_is_gone(tmp_path: Path) -> None:
    async def work() -> None:
        async with ledger_at(tmp_path / "l") as ledger:
            (tmp_path / lock.NAME).unlink()
            await until((tmp_path / lock.NAME).exists)
            await ledger.append((record(1),))

    asyncio.run(work())


def test_two_ledgers_in_one_directory_are_refused_at_the_start(tmp_path: Path) -> None:
    async def work() -> None:
        ledger = Ledger(tmp_path / "l", LedgerSettings())
        try:
            await ledger.begun()
        finally:
            ledger.close(5)

    with holder(tmp_path), pytest.raises(StartError, match="keeps its ledger"):
        asyncio.run(work())


def test_one_that_has_ended_within_a_call_to_the_disk_is_waited_for(tmp_path: Path) -> None:
    """Of a kvd that was killed while its disk hangs a thread is left, which holds the lock: the next one serves."""

    async def work() -> None:
        with holder(tmp_path, ENDED) as pid:
            await until(lambda: ") Z " in Path(f"/proc/{pid}/stat").read_text())
            ledger = Ledger(tmp_path / "l", LedgerSettings())
            await ledger.begun()
            await ledger.opened
            assert "has ended and still holds it" in ledger.state.reason
        await until(lambda: ledger.state.open)
        ledger.close(5)

    asyncio.run(work())


def test_a_ledger_whose_directory_another_kvd_has_taken_over_writes_no_more(tmp_path: Path) -> None:
    """Both began in directories of this name; the first one's was moved away."""
    directory = tmp_path / "state"

    async def work() -> None:
        async with ledger_at(directory / "l") as ledger:
            await ledger.append((record(1),))
            directory.rename(tmp_path / "elsewhere")
            with holder(directory) as pid:
                with pytest.raises(LedgerError, match=f"process {pid}"):
                    await ledger.append((record(2),))
                assert not (directory / "l").exists()
            await until(lambda: ledger.state.open)
            assert sorted(p.name for p in directory.glob("l*") if "-" not in p.name) == ["l", "ledger.lock"]

    asyncio.run(work())
