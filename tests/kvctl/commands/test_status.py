"""`kvctl status`."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest

from kvd.wire import query
from tests.kvctl.conftest import STATUS, FakeDaemon, Outcome

Run = Callable[..., Outcome]


@pytest.mark.parametrize("away", ["", "database or disk is full"])
def test_a_ledger_that_cannot_be_written_is_told_with_the_reason(
    daemon: FakeDaemon, run: Run, away: str
) -> None:
    daemon.answers[query.GetStatus] = lambda _: msgspec.structs.replace(STATUS, ledger_away=away)
    shown = run("status", "--runtime-dir", daemon.directory).out
    assert ("away: database or disk is full" in shown) == bool(away)
    document = json.loads(run("status", "--runtime-dir", daemon.directory, "-o", "json").out)
    assert document["ledger_away"] == away
