"""`kvctl status`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

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


def test_a_peer_that_is_not_up_and_who_was_not_let_in_are_told_with_the_reason(
    daemon: FakeDaemon, run: Run
) -> None:
    away = msgspec.structs.replace(
        STATUS.peers[0], state="down", reason="it does not let us in", hint="type this"
    )
    stranger = query.RefusedKey(key="K" * 40, address="10.0.0.9", times=3, age=2.0, was="10.0.0.9:1")
    told = msgspec.structs.replace(STATUS, peers=(away,), refused=(stranger,))
    daemon.answers[query.GetStatus] = lambda _: told
    shown = run("status", "--runtime-dir", daemon.directory).out
    assert "10.0.0.8:7766 is down: it does not let us in; type this" in shown
    assert "310 us" not in shown, "the last round trip of a peer that is down says nothing"
    assert "K" * 40 in shown
    document = json.loads(run("status", "--runtime-dir", daemon.directory, "-o", "json").out)
    assert document["peers"][0]["reason"] == "it does not let us in"
    assert (document["refused"][0]["times"], document["refused"][0]["was"]) == (3, "10.0.0.9:1")


@pytest.mark.parametrize("why", ["", "PermissionError: /root/venv"])
def test_a_kvd_that_can_compare_no_engines_says_so(daemon: FakeDaemon, run: Run, why: str) -> None:
    daemon.answers[query.GetStatus] = lambda _: msgspec.structs.replace(STATUS, comparing=why)
    assert (
        "not introduced: PermissionError" in run("status", "--runtime-dir", daemon.directory).out
    ) == bool(why)
    assert json.loads(run("status", "--runtime-dir", daemon.directory, "-o", "json").out)["comparing"] == why


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, "3 by etcd\n"),
        ({"state": "waiting"}, "3 by etcd, which has not answered yet"),
        (
            {"state": "away", "age": 12.0, "reason": "no answer"},
            "etcd, which is away since 12.0 s: no answer",
        ),
        ({"vanished": 2}, "etcd names 2 of them no more"),
        ({"other_key": 1}, "1 not linked: another key is expected here"),
    ],
)
def test_a_source_of_members_is_shown_with_its_state(
    daemon: FakeDaemon, run: Run, changes: dict[str, Any], wanted: str
) -> None:
    row = msgspec.structs.replace(query.Membership(source="etcd", state="known", members=3), **changes)
    daemon.answers[query.GetStatus] = lambda _: msgspec.structs.replace(STATUS, membership=row)
    shown = run("status", "--runtime-dir", daemon.directory).out
    assert wanted.strip() in shown
    document = json.loads(run("status", "--runtime-dir", daemon.directory, "-o", "json").out)
    assert document["membership"]["source"] == "etcd"


def test_a_kvd_of_an_earlier_version_tells_of_no_source(daemon: FakeDaemon, run: Run) -> None:
    daemon.answers[query.GetStatus] = lambda _: msgspec.structs.replace(STATUS, membership=None)
    assert "members" not in run("status", "--runtime-dir", daemon.directory).out
