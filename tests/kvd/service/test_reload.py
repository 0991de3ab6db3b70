"""SIGHUP: what may change at run time changes, and all else waits for a restart."""

from __future__ import annotations

import logging
from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest

from kvd.service.config import Config, LeaseSettings, LivenessSettings, PeerSettings
from kvd.service.daemon import Daemon
from kvd.service.notify import Notifier
from kvd.service.run import _reload


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
    for _ in range(2):
        _reload(cast("Daemon", daemon), lambda: new, cast("Notifier", notifier))
    assert (daemon.config.peer, daemon.config.drain_seconds) == (old.peer, 1.0)
    assert daemon.config.leases is daemon.leases.settings is new.leases
    assert daemon.registry.settled == 103.0
    assert said == ["reloaded, but these need a restart: peer"] * 2
