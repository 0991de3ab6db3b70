"""The operator's client: answers, events, and errors that say what to do."""

from __future__ import annotations

import os
import signal
import socket
from collections import Counter
from pathlib import Path

import pytest

from kvd.client.errors import RefusedByDaemon, SocketNotPermitted, Unreachable
from kvd.client.operator import connect
from kvd.wire.handshake import DescribeEngine
from kvd.wire.query import GetStatus, KvdStatus
from tests.support.daemons import daemons, facts, session, wait_for, worker
from tests.support.raising import raises


def test_a_missing_socket_is_named_with_the_next_step(tmp_path: Path) -> None:
    with raises("KVD-UNREACHABLE", match=f"{tmp_path}/kvd.sock does not exist") as error:
        connect(tmp_path)
    assert "systemctl status kvd" in error.value.hint


def test_a_socket_that_was_left_behind_is_told_apart(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "kvd.sock"))
    with pytest.raises(Unreachable, match="left behind"):
        connect(f"ipc://{tmp_path}/kvd.sock")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may use every socket")
def test_a_locked_socket_is_told_apart_by_type(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as locked:
        locked.bind(str(tmp_path / "kvd.sock"))
        locked.listen()
        (tmp_path / "kvd.sock").chmod(0)
        with pytest.raises(SocketNotPermitted):
            connect(tmp_path)


def test_asks_are_answered_refused_or_time_out() -> None:
    with daemons() as (kvd,), connect(kvd.directory) as operator:
        assert isinstance(operator.ask(GetStatus()), KvdStatus)
        with pytest.raises(RefusedByDaemon) as refused:
            operator.ask(DescribeEngine(engine_id="e", kvd_id="k", kvd_generation="g"))
        assert refused.value.code == "KVD-NOT-HERE"
        kvd.signal(signal.SIGSTOP)
        with raises("KVD-TIMEOUT", match=r"0\.3 s"):
            operator.ask(GetStatus(), 0.3)
        kvd.signal(signal.SIGCONT)
        assert isinstance(operator.ask(GetStatus()), KvdStatus)
        kvd.kill()
        with raises("KVD-UNREACHABLE"):
            operator.ask(GetStatus(), 0.3)


def test_a_question_leaves_no_failed_handshake_behind() -> None:
    with daemons() as (kvd,):
        ended = "connections.local.ended"
        before = Counter(kvd.status().counters)  # it has no line for what did not happen yet
        for _ in range(5):
            kvd.ask(GetStatus())
        wait_for(lambda: kvd.status().counters.get(ended, 0) > before[ended] + 5)
        failed = "connections.local.handshake_failed"
        assert kvd.status().counters.get(failed, 0) == before[failed]


def test_events_come_in_order_without_gaps() -> None:
    with daemons() as (kvd,), connect(kvd.directory) as operator:
        events = operator.events(timeout=5)
        for number in range(50):  # until the subscription has arrived
            with session(kvd, worker(facts(f"warm{number}"))):
                pass
            first = next(operator.events(timeout=0.05), None)
            if first is not None:
                break
        with session(kvd, worker(facts("e"))):
            pass
        seen = []
        for event in events:
            seen.append(event)
            if event.kind == "engine.gone" and event.subject == "e":
                break
        assert [e.seq for e in seen] == list(range(seen[0].seq, seen[0].seq + len(seen)))
        of_e = [e.kind for e in seen if e.subject in ("e", "e/tp0")]
        assert of_e == ["worker.registered", "engine.ready", "worker.gone", "engine.gone"]


def test_who_follows_events_is_told_when_kvd_goes_away() -> None:
    changes: list[bool] = []
    with daemons() as (kvd,), connect(kvd.directory) as operator:

        def connected(now: bool) -> None:
            changes.append(now)
            if now:
                kvd.kill()

        assert next(operator.events(timeout=2.0, connected=connected), None) is None
    assert changes == [True, False]
