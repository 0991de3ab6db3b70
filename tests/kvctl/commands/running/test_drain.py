"""`kvctl drain`: what is ordered, what is waited for, and who still holds something when time runs out."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest

from kvd.wire.drain import DrainEngines, DrainRow, EnginesDraining
from kvd.wire.frame import Message
from kvd.wire.query import LeaseList, LeaseReader, LeaseRow, ListLeases
from kvd.wire.reply import Refused
from tests.kvctl.conftest import FakeDaemon, Run

DONE = DrainRow(engine_id="decode-0", role="decode", draining=True, age=9.0, prefills=0, pushes=0, loads=0)
BUSY = msgspec.structs.replace(DONE, leases=2, claimed=1, loads=3)


@pytest.fixture
def answers(daemon: FakeDaemon) -> Callable[..., list[DrainEngines]]:
    """Has the kvd answer with these rows, one after the other, the last one for good; gives what it was asked."""

    def made(*rows: DrainRow | None) -> list[DrainEngines]:
        asked: list[DrainEngines] = []

        def answer(message: Message) -> Message:
            assert isinstance(message, DrainEngines)
            row = rows[min(len(asked), len(rows) - 1)]
            asked.append(message)
            if row is None:
                return Refused(code="KVD-ENGINE-GONE", message="engine 'decode-0' is gone: it said goodbye")
            return EnginesDraining(rows=(row,))

        daemon.answers[DrainEngines] = answer
        return asked

    return made


def test_an_engine_is_drained_and_waited_for(
    run: Run, daemon: FakeDaemon, answers: Callable[..., list[DrainEngines]]
) -> None:
    asked = answers(msgspec.structs.replace(BUSY, grace=4.0), BUSY, DONE)
    outcome = run("drain", "decode-0", "--wait", "-o", "json", "--socket", daemon.directory)
    assert outcome.code == 0
    assert [(one.engine_id, one.action) for one in asked] == [
        ("decode-0", "begin"), ("decode-0", "look"), ("decode-0", "look"),
    ]  # fmt: skip
    assert asked[0].grace_seconds == 5.0
    [engine] = json.loads(outcome.out)["engines"]
    assert (engine["draining"], engine["held"]) == (True, 0)


def test_an_engine_that_has_gone_holds_nothing(
    run: Run, daemon: FakeDaemon, answers: Callable[..., list[DrainEngines]]
) -> None:
    answers(BUSY, None)
    outcome = run("drain", "decode-0", "--wait", "--socket", daemon.directory)
    assert outcome.code == 0
    assert "engine 'decode-0' is gone" in outcome.err


def test_time_that_runs_out_is_4_with_who_still_holds_what(
    run: Run, daemon: FakeDaemon, answers: Callable[..., list[DrainEngines]]
) -> None:
    answers(BUSY)
    leases = (
        LeaseRow(
            engine_id="decode-0", request_id="cmpl-7", readers=1, claims=(LeaseReader(who="d-1", left=9),)
        ),
        LeaseRow(engine_id="decode-0", request_id="cmpl-8"),
    )
    daemon.answers[ListLeases] = lambda _: LeaseList(rows=leases)
    outcome = run("drain", "decode-0", "--wait", "--timeout", "400ms", "--socket", daemon.directory)
    assert outcome.code == 4
    assert (
        "not drained within 400ms: decode-0 holds 2 leases, 3 loads (cmpl-7 by d-1; cmpl-8 by nobody)"
        in outcome.err
    )
    assert "kvctl leases release" in outcome.err


def test_an_engine_that_serves_again_is_not_drained(
    run: Run, daemon: FakeDaemon, answers: Callable[..., list[DrainEngines]]
) -> None:
    answers(BUSY, msgspec.structs.replace(DONE, draining=False))
    outcome = run("drain", "decode-0", "--wait", "--timeout", "400ms", "--socket", daemon.directory)
    assert outcome.code == 4
    assert "decode-0 does not drain: it was started again, or somebody had it take requests" in outcome.err


def test_the_host_is_called_by_its_name(
    run: Run, daemon: FakeDaemon, answers: Callable[..., list[DrainEngines]]
) -> None:
    asked = answers(DONE)
    assert run("drain", "node7", "--grace", "0", "--socket", daemon.directory).code == 0
    assert run("drain", "node7", "--undo", "--socket", daemon.directory).code == 0
    assert [(one.engine_id, one.action, one.grace_seconds) for one in asked] == [
        ("", "begin", 0.0), ("", "undo", 5.0),
    ]  # fmt: skip


@pytest.mark.parametrize("host", [True, False])
def test_a_host_that_drains_says_so_of_engines_to_come_and_one_that_serves_says_nothing_of_reads(
    run: Run, daemon: FakeDaemon, host: bool
) -> None:
    serving = msgspec.structs.replace(BUSY, draining=False)
    daemon.answers[DrainEngines] = lambda _: EnginesDraining(rows=(serving,), host=host)
    out = run("drain", "--socket", daemon.directory).out
    assert ("engines that come to this kvd later drain too: kvctl drain HOST --undo ends that" in out) == host
    assert out.splitlines()[1].split() == ["decode-0", "decode", "serving", "-", "2", "-", "0", "0", "3"]


def test_without_a_target_it_only_looks(
    run: Run, daemon: FakeDaemon, answers: Callable[..., list[DrainEngines]]
) -> None:
    asked = answers(BUSY)
    outcome = run("drain", "--socket", daemon.directory)
    assert outcome.code == 0
    assert [one.action for one in asked] == ["look"]
    daemon.answers[DrainEngines] = lambda _: EnginesDraining(rows=())
    empty = run("drain", "--socket", daemon.directory)
    assert (empty.code, "no engine of this host has its scheduler at this kvd" in empty.err) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("decode-9",), "did you mean decode-0"),
        (("--undo",), "which engine?"),
        (("--wait",), "which engine?"),
        (("decode-0", "--undo", "--wait"), "--undo ends a drain"),
        (("decode-0", "--grace", "soon"), "is not a duration"),
    ],
)
def test_wrong_usage_is_2_and_orders_nothing(
    run: Run,
    daemon: FakeDaemon,
    answers: Callable[..., list[DrainEngines]],
    arguments: tuple[str, ...],
    why: str,
) -> None:
    asked = answers(DONE)
    outcome = run("drain", *arguments, "--socket", daemon.directory)
    assert (outcome.code, why in outcome.err) == (2, True), outcome.err
    assert asked == []
