"""SIGHUP: what may change at run time changes, and all else waits for a restart."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest

from kvd.service import reload as module
from kvd.service.config import Config, LeaseSettings, LivenessSettings, PeerSettings
from kvd.service.daemon import Daemon
from kvd.service.notify import Notifier
from kvd.service.reload import reloading


async def until_said(said: list[str], count: int) -> None:
    """Return when the service manager was told so much."""
    async with asyncio.timeout(10):
        while len(said) < count:  # noqa: ASYNC110 (what is looked at sets no event)
            await asyncio.sleep(0.001)


def test_what_needs_a_restart_stays_as_it_is_and_is_named_at_each_reload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("kvd"), "setLevel", lambda _: None)
    old = Config()
    daemon = SimpleNamespace(
        config=old,
        myself=SimpleNamespace(started=100.0),
        registry=SimpleNamespace(),
        counters=Counter(),
        liveness=SimpleNamespace(),
        leases=SimpleNamespace(),
        ledger=SimpleNamespace(),
    )
    new = Config(
        peer=PeerSettings(max_message_bytes=1),
        leases=LeaseSettings(max_seconds=7.0),
        liveness=LivenessSettings(settle_seconds=3.0),
        drain_seconds=1.0,
    )
    said: list[str] = []
    notifier = SimpleNamespace(reloading=lambda: None, ready=said.append)

    async def work() -> None:
        told = asyncio.Event()
        serving = asyncio.get_running_loop().create_task(
            reloading(cast("Daemon", daemon), told, lambda: new, cast("Notifier", notifier))
        )
        for times in (1, 2):
            told.set()
            await until_said(said, times)
        serving.cancel()

    asyncio.run(work())
    assert (daemon.config.peer, daemon.config.drain_seconds) == (old.peer, 1.0)
    assert daemon.config.leases is daemon.leases.settings is new.leases
    assert daemon.registry.settled == 103.0
    assert said == ["reloaded, but these need a restart: peer"] * 2


def test_whatever_keeps_settings_from_being_read_the_service_manager_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for the end of a reload. The loop goes on meanwhile: the disk of the settings may hang."""
    monkeypatch.setattr(module, "READ_SECONDS", 0.05)
    answers = threading.Event()

    def hangs() -> Config:
        answers.wait(10)
        return Config()

    def fails() -> Config:
        raise PermissionError(13, "Permission denied", "/etc/kvd/kvd.yaml")

    said: list[str] = []
    notifier = SimpleNamespace(reloading=lambda: said.append("reloading"), ready=said.append)
    daemon = SimpleNamespace(counters=Counter())

    async def work() -> None:
        for number, read in enumerate((hangs, fails), 1):
            told = asyncio.Event()
            serving = asyncio.get_running_loop().create_task(
                module.reloading(cast("Daemon", daemon), told, read, cast("Notifier", notifier))
            )
            told.set()
            await until_said(said, 2 * number)
            serving.cancel()
        answers.set()

    asyncio.run(work())
    assert [said[0], said[2]] == ["reloading"] * 2
    assert "could not be read within 0.05 s" in said[1]
    assert "PermissionError: [Errno 13] Permission denied: '/etc/kvd/kvd.yaml'" in said[3]
    assert daemon.counters["reloads.failed"] == 2
