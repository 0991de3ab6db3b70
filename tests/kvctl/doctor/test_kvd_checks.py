"""What kvd says of itself, its peers, engines and workers, and what doctor makes of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvctl.cli.settings import Settings
from kvctl.doctor import kvd_checks as module
from kvctl.doctor.kvd_checks import kvd_checks
from kvctl.views.doctor import Check
from kvd.installed import UNINSTALLED
from kvd.wire import query
from kvd.wire.identity import Endpoint
from tests.kvctl.conftest import ENGINES, STATUS, WORKERS, FakeDaemon


def checks(daemon: FakeDaemon) -> dict[str, Check]:
    found, workers = kvd_checks(Settings(runtime_dir=str(daemon.directory)))
    assert workers == [4242]
    return {check.code: check for check in found}


def status(daemon: FakeDaemon, **changes: Any) -> None:
    daemon.answers[query.GetStatus] = lambda _: msgspec.structs.replace(STATUS, **changes)


def refused(key: str, **changes: Any) -> query.RefusedKey:
    row = query.RefusedKey(key=key, address="10.0.0.9", times=3, age=2.0)
    return msgspec.structs.replace(row, **changes)


def engines(daemon: FakeDaemon, *rows: query.EngineRow) -> None:
    daemon.answers[query.ListEngines] = lambda _: query.EngineList(rows=rows)


def test_a_kvd_that_keeps_up_is_well(daemon: FakeDaemon) -> None:
    found = checks(daemon)
    assert {found[code].state for code in ("KVD", "KVD_PACE", "PEERS", "ENGINES")} == {"ok"}
    assert found["ENGINES"].found == "2 ready: decode-0, prefill-1"


@pytest.mark.parametrize(
    ("changes", "code", "told"),
    [
        ({"version": "9.9"}, "KVD_VERSION", "kvd is 9.9"),
        ({"draining": True}, "KVD_DRAINING", "is stopping"),
        ({"gauges": {"loop.recent_turn_seconds": 2.0}}, "KVD_SLOW", "busy with one thing for 2.00 s"),
        ({"counters": {"sent.dropped": 7}}, "KVD_LOSSES", "sent.dropped 7"),
        ({"ledger_away": "disk full"}, "LEDGER_AWAY", "cannot be written: disk full"),
        (
            {"peers": (msgspec.structs.replace(STATUS.peers[0], state="down"),)},
            "PEER_DOWN",
            "10.0.0.8:7766 is down",
        ),
        (
            {"peers": (msgspec.structs.replace(STATUS.peers[0], state="down", reason="no", hint="do"),)},
            "PEER_DOWN",
            "10.0.0.8:7766 is down: no",
        ),
        (
            {
                "peers": (
                    msgspec.structs.replace(STATUS.peers[0], state="untrusted", reason="no key", hint="do"),
                )
            },
            "PEER_UNTRUSTED",
            "no key",
        ),
        (
            {"refused": (refused("K"),)},
            "KEY_REFUSED",
            "10.0.0.9 was not let in, 3 times, last 2.00 s ago: its key K",
        ),
        (
            {
                "membership": query.Membership(
                    source="dns", state="away", age=12.0, reason="no name", members=3
                )
            },
            "MEMBERSHIP_AWAY",
            "dns, which names the other kvds, is away since 12.0 s: no name",
        ),
        ({"ledger_aside": ("l.broken-7",)}, "LEDGER_DAMAGED", "l.broken-7"),
        ({"keys": query.PeerKeys(identity="per host", twice="h has A and B")}, "KEYS_TWICE", "h has A and B"),
        ({"keys": query.PeerKeys(identity="per host", pair="F holds B")}, "KEYS_PAIR", "F holds B"),
        ({"refused": (refused(""),)}, "KEY_EXPECTED", "10.0.0.9 was not let in"),
    ],
)
def test_what_is_not_well_with_kvd_is_a_warning(
    daemon: FakeDaemon, changes: dict[str, Any], code: str, told: str
) -> None:
    status(daemon, **changes)
    found = checks(daemon)[code]
    assert (found.state, told in found.found) == ("warning", True)
    assert found.hint


def test_a_kvd_that_can_compare_no_engines_fails(daemon: FakeDaemon) -> None:
    status(daemon, comparing="no process to compare engines can be started: PermissionError(13)")
    found = checks(daemon)["COMPARING"]
    assert (found.state, "PermissionError" in found.found) == ("failed", True)


def test_a_damaged_ledger_is_to_be_left_while_it_is_taken_over(daemon: FakeDaemon) -> None:
    status(daemon, ledger_aside=("l.damaged-8", "l.broken-7"))
    hint = checks(daemon)["LEDGER_DAMAGED"].hint
    assert "leave l.damaged-8 alone" in hint
    assert "delete l.broken-7" in hint


def test_the_step_for_a_revoked_peer_is_no_command_to_type(daemon: FakeDaemon) -> None:
    for said, told in (("leave it", "leave it"), ("`kvctl keys trust`", "type `kvctl keys trust`")):
        status(
            daemon,
            peers=(msgspec.structs.replace(STATUS.peers[0], state="untrusted", reason="no key", hint=said),),
        )
        assert checks(daemon)["PEER_UNTRUSTED"].hint == told


def test_a_host_that_was_revoked_and_still_tries_is_no_warning(daemon: FakeDaemon) -> None:
    status(daemon, refused=(refused("K", was="10.0.0.9:7766"), refused("L", age=7200.0)))
    found = checks(daemon)
    assert (found["KEY_REVOKED"].state, "it was 10.0.0.9:7766" in found["KEY_REVOKED"].found) == ("ok", True)
    assert "KEY_REFUSED" not in found, "two hours ago is long ago"


def test_what_another_host_is_to_type_has_this_ones_key_and_place(daemon: FakeDaemon) -> None:
    status(daemon, refused=(refused(""),), keys=query.PeerKeys(identity="per host", public="P"))
    assert "kvctl keys trust 'P' [::1]:7766 --replace" in checks(daemon)["KEY_EXPECTED"].hint


def test_a_kvctl_that_was_never_installed_has_no_version_to_compare(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "own_version", lambda: UNINSTALLED)
    status(daemon, version="9.9")
    assert "KVD_VERSION" not in checks(daemon)


def test_an_engine_that_is_not_complete_is_told_with_kvds_reason(daemon: FakeDaemon) -> None:
    found = checks(daemon)["ENGINE_PARTIAL"]
    assert found.state == "warning"
    assert found.found == "prefill-0 is partial, 2 of 8 ranks: 6 of 8 workers are missing"


def test_a_worker_that_is_silent_is_told_with_its_pid(daemon: FakeDaemon) -> None:
    assert "scheduler of decode-0, pid 4240" in checks(daemon)["WORKER_SILENT"].found


def test_a_worker_at_another_kvd_is_looked_for_there(daemon: FakeDaemon) -> None:
    """Its process is none of this host's: nothing is looked up by its number here."""
    afar = msgspec.structs.replace(WORKERS[0], state="silent", pid=77, at=Endpoint("10.0.0.8", 7766))
    daemon.answers[query.ListWorkers] = lambda _: query.WorkerList(rows=(WORKERS[0], afar))
    found = checks(daemon)["WORKER_SILENT"]
    assert "/proc" not in found.hint
    assert "10.0.0.8:7766" in found.hint


def test_a_decoder_that_fails_requests_on_a_miss_is_told(daemon: FakeDaemon) -> None:
    engines(daemon, msgspec.structs.replace(ENGINES[0], policy="fail"))
    assert "recompute" in checks(daemon)["POLICY_FAIL"].hint


def test_an_engine_that_does_not_know_its_weights_is_told_with_the_reason(daemon: FakeDaemon) -> None:
    facts = {"weights_source": "unknown: they come from s3 storage"}
    row = msgspec.structs.replace(ENGINES[0], engine=msgspec.structs.replace(ENGINES[0].engine, facts=facts))
    engines(daemon, row)
    found = checks(daemon)["WEIGHTS_UNKNOWN"]
    assert (found.state, "they come from s3 storage" in found.found) == ("warning", True)
    assert 'set "weights"' in found.hint


def test_no_engine_at_all_says_how_one_is_started(daemon: FakeDaemon) -> None:
    engines(daemon)
    found = checks(daemon)["ENGINES"]
    assert (found.state, "KvdConnector" in found.hint) == ("warning", True)


@pytest.mark.parametrize(("state", "code"), [("gone", "ENGINE_GONE"), ("unreachable", "ENGINE_UNREACHABLE")])
def test_an_engine_that_is_not_there_is_told_by_its_state(daemon: FakeDaemon, state: Any, code: str) -> None:
    engines(daemon, msgspec.structs.replace(ENGINES[0], state=state, reason="it ended"))
    assert checks(daemon)[code].found == f"decode-0 is {state}, 2 of 2 ranks: it ended"


def test_one_pair_of_keys_for_all_hosts_is_told_and_a_pair_for_each_is_well(daemon: FakeDaemon) -> None:
    status(daemon, keys=query.PeerKeys(identity="shared"))
    assert "kvctl keys generate" in checks(daemon)["KEYS_SHARED"].hint
    status(daemon, keys=query.PeerKeys(identity="per host", trusted=3))
    found = checks(daemon)["KEYS"]
    assert (found.state, found.found) == ("ok", "a key for each host, 3 trusted")


def test_a_package_that_was_upgraded_under_kvd_is_a_warning(daemon: FakeDaemon) -> None:
    status(daemon, installed="9.9")
    found = checks(daemon)["KVD_VERSION"]
    assert (found.state, found.found) == (
        "warning",
        "kvd was started with 0.1.0, and 9.9 is installed now",
    )
