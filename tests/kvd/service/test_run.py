"""The parts that a daemon runs, one by one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from kvd.service import run
from kvd.service.daemon import Daemon


def test_a_kvd_is_prepared_for_handshakes_before_its_ledger_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once() -> None:
        pass

    async def prepare() -> None:
        frozen = asyncio.Event()
        monkeypatch.setattr(run, "gc", SimpleNamespace(freeze=frozen.set, set_threshold=lambda *_: None))
        never = asyncio.get_running_loop().create_future()
        daemon = SimpleNamespace(
            prepared=False, ledger=SimpleNamespace(opened=never),
            comparers=SimpleNamespace(start=at_once, keep_trying=asyncio.Event().wait),
        )  # fmt: skip
        task = asyncio.create_task(run._prepare(cast("Daemon", daemon)))
        async with asyncio.timeout(10.0):
            await frozen.wait()
        task.cancel()
        assert daemon.prepared

    asyncio.run(prepare())
