"""What is made of the answers of two kvds: links, keys, clocks, versions, backends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvctl.cli.settings import Settings
from kvctl.doctor import peer_checks as module
from kvctl.doctor.peer_checks import Compared, PeerAnswer, peer_checks
from kvctl.views.doctor import Check
from kvd.wire import query
from kvd.wire.identity import Endpoint
from tests.kvctl.conftest import ENGINES, STATUS, WORKERS, FakeDaemon

HERE, THERE = "[::1]:7766", "10.0.0.8:7766"
KEYS = query.PeerKeys(identity="none", public="K")
MINE = msgspec.structs.replace(STATUS, keys=KEYS)
THEIRS = msgspec.structs.replace(
    STATUS,
    kvd_id="kvd-node8",
    keys=KEYS,
    peers=(msgspec.structs.replace(STATUS.peers[0], endpoint=Endpoint("::1", 7766), kvd_id="kvd-node7"),),
)


def checks(
    daemon: FakeDaemon,
    monkeypatch: pytest.MonkeyPatch,
    mine: dict[str, Any] | None = None,
    theirs: dict[str, Any] | None = None,
    **asked: Any,
) -> dict[str, Check]:
    """The checks by code, of two kvds that are well but for these changes."""
    daemon.answers[query.GetStatus] = lambda _: msgspec.structs.replace(MINE, **(mine or {}))
    engines = (msgspec.structs.replace(ENGINES[1], local=True),)
    told: dict[str, Any] = {"clock": Compared(0.001, 0.0005), "workers": WORKERS, "engines": engines} | asked
    answer = PeerAnswer(THERE, 0.001, msgspec.structs.replace(THEIRS, **(theirs or {})), **told)
    monkeypatch.setattr(module, "_asked", lambda *_: answer)
    found = peer_checks(Settings(runtime_dir=str(daemon.directory)), THERE, probe=False)
    return {check.code: check for check in found}


def row(**changes: Any) -> tuple[query.PeerRow, ...]:
    return (msgspec.structs.replace(STATUS.peers[0], **changes),)


def test_without_a_peer_socket_there_is_no_peer(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checks(daemon, monkeypatch, {"endpoint": Endpoint()})
    assert set(found) == {"PEER_NO_SOCKET"}
    assert "peer.listen" in found["PEER_NO_SOCKET"].hint


def test_all_is_well(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checks(daemon, monkeypatch)
    assert {code: check.state for code, check in found.items()} == dict.fromkeys(
        (
            "PEER_ANSWERS",
            "PEER_THERE",
            "PEER_BACK",
            "PEER_KEYS",
            "PEER_CLOCK",
            "PEER_VERSION",
            "PEER_BACKENDS",
            "PEER_TRANSPORT",
        ),
        "ok",
    )
    assert found["PEER_TRANSPORT"].found.startswith("decode-0 from prefill-1: nixl from host to host memory")
    assert "nixl" in found["PEER_BACKENDS"].found


def test_a_link_that_is_down_fails_on_its_side(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checks(daemon, monkeypatch, {"peers": row(state="down", reason="no", hint="do this")})
    assert (found["PEER_THERE"].state, found["PEER_BACK"].state) == ("failed", "ok")
    assert found["PEER_THERE"].hint == "do this"
    away = msgspec.structs.replace(THEIRS.peers[0], state="down", reason="refused")
    found = checks(daemon, monkeypatch, theirs={"peers": (away,)})
    assert (found["PEER_THERE"].state, found["PEER_BACK"].state) == ("ok", "failed")
    assert "peer.advertise" in found["PEER_BACK"].hint
    found = checks(daemon, monkeypatch, {"peers": ()}, {"peers": ()})
    assert (found["PEER_THERE"].state, found["PEER_BACK"].state) == ("skipped", "skipped")
    assert HERE in found["PEER_BACK"].hint


@pytest.mark.parametrize(
    ("clock", "state", "told"),
    [
        (Compared(0.012, 0.0004), "ok", "12.0 ms ahead, give or take 400 us"),
        (Compared(-4.1, 0.0006), "warning", "4.10 s behind, give or take 600 us"),
        (Compared(1.2, 0.3), "ok", "1.20 s ahead, give or take 300 ms"),  # it may be less than a second
        (None, "skipped", "does not tell its time"),
    ],
)
def test_clocks_are_compared_with_their_uncertainty(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, clock: Compared | None, state: str, told: str
) -> None:
    found = checks(daemon, monkeypatch, clock=clock)["PEER_CLOCK"]
    assert (found.state, told in found.found) == (state, True), found.found


@pytest.mark.parametrize(
    ("theirs", "code", "state", "told"),
    [
        ({"version": "9.9"}, "PEER_VERSION", "warning", "kvd is 0.1.0 here and 9.9 at"),
        ({"installed": "9.9"}, "PEER_VERSION", "warning", "was started with 0.1.0, and 9.9 is installed"),
        (
            {"keys": query.PeerKeys(identity="shared")},
            "PEER_KEYS",
            "warning",
            "keys are not in use here, and shared by all hosts at",
        ),
        (
            {"refused": (query.RefusedKey(key="K", address="a", times=1, age=2.0),)},
            "PEER_KEYS",
            "warning",
            "2.00 s ago",
        ),
    ],
)
def test_what_does_not_go_together_is_named(
    daemon: FakeDaemon,
    monkeypatch: pytest.MonkeyPatch,
    theirs: dict[str, Any],
    code: str,
    state: str,
    told: str,
) -> None:
    found = checks(daemon, monkeypatch, theirs=theirs)[code]
    assert (found.state, told in found.found, bool(found.hint)) == (state, True, True), found.found


def test_backends_that_both_have_are_named(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(backend: str) -> tuple[query.WorkerRow, ...]:
        return (msgspec.structs.replace(WORKERS[0], backend=backend),)

    for mine, theirs, state, told in (
        ("mooncake", "mooncake", "ok", "mooncake over tcp"),
        ("direct", "direct", "failed", "does not leave its host"),
        ("nixl", "mooncake", "failed", "workers use nixl here and mooncake at"),
        ("nixl", "", "skipped", f"no worker of {THERE}"),
    ):
        daemon.answers[query.ListWorkers] = lambda _, mine=mine: query.WorkerList(rows=of(mine))  # type: ignore[misc]
        found = checks(daemon, monkeypatch, workers=of(theirs))["PEER_BACKENDS"]
        assert (found.state, told in found.found) == (state, True), found.found
