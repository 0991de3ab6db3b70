"""`kvctl force-miss`: what it asks of kvd, what it prints, how it follows an order, and with which code it ends."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvd.geometry.rank import Rank
from kvd.wire import query
from kvd.wire.order import (
    AllWaiting,
    ClearForced,
    ForcedCleared,
    ForceMiss,
    GetForced,
    LoadPart,
    NextLoads,
    OneRequest,
)
from kvd.wire.reply import Refused
from tests.kvctl.order_answers import ANSWERS, ORDER, WAITING, forced, miss

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.wire.frame import Message
    from tests.kvctl.conftest import FakeDaemon, Run

    Force = Callable[..., tuple[int, Any]]


@pytest.fixture
def force(run: Run, daemon: FakeDaemon) -> Force:
    """The command as JSON: exit code, then its document or its error."""
    daemon.answers.update(ANSWERS)

    def command(*words: str) -> tuple[int, Any]:
        outcome = run("force-miss", *words, "-o", "json", "--socket", daemon.directory)
        lines = [line for line in outcome.err.splitlines() if line.startswith("{")]
        return outcome.code, json.loads(outcome.out or lines[-1])

    return command


def asked(daemon: FakeDaemon, kind: type[Message]) -> list[Any]:
    return [message for message in daemon.asked if isinstance(message, kind)]


@pytest.mark.parametrize(
    ("words", "target"),
    [
        (("cmpl-4",), OneRequest("cmpl-4")),
        (("--waiting",), AllWaiting()),
        (("--next", "3"), NextLoads(count=3)),
        (("--next", "200", "--ratio", "0.3", "--seed", "7"), NextLoads(count=200, ratio=0.3, seed=7)),
        (("--ratio", "0.5", "--for", "2m"), NextLoads(ratio=0.5, seconds=120.0)),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_it_asks_for_what_was_typed_and_does_nothing_without_yes(
    force: Force, daemon: FakeDaemon, words: tuple[str, ...], target: object
) -> None:
    code, body = force(*words)
    (message,) = asked(daemon, ForceMiss)
    assert message == ForceMiss(engine_id="decode-0", target=target)  # type: ignore[arg-type]
    assert (code, body["carried_out"], body["order_id"], body["uid"]) == (0, False, "", None)
    assert asked(daemon, GetForced) == []


def test_a_part_and_a_moment_are_passed_on(force: Force, daemon: FakeDaemon) -> None:
    force("cmpl-4", "--when", "flight", "--rank", "tp1.pp2", "--engine", "decode-9")
    force("cmpl-4", "--group", "0", "--layer", "model.layers.3.self_attn")
    first, second = asked(daemon, ForceMiss)
    assert (first.when, first.part, first.engine_id) == ("flight", LoadPart(rank=Rank(1, 2)), "decode-9")
    assert (second.when, second.part) == ("now", LoadPart(group=0, layer="model.layers.3.self_attn"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give one of"),
        (("cmpl-4", "--waiting"), "a request and --waiting"),
        (("--clear", "--order", "x"), "--order and --clear"),
        (("--waiting", "--seed", "1"), "--seed is given without --next"),
        (("--waiting", "--for", "1h"), "--for is given without --next"),
        (("cmpl-4", "--layer", "x", "--when", "before"), "not --when before"),
        (("--ratio", "1.5"), "1.5"),
        (("--next", "0"), "'0'"),
        (("cmpl-4", "--rank", "one"), "tp1"),
        (("cmpl-4", "--when", "later"), "later"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_what_makes_no_sense_is_2(
    force: Force, daemon: FakeDaemon, words: tuple[str, ...], said: str
) -> None:
    code, error = force(*words)
    assert (code, said in error["message"]) == (2, True), error
    assert asked(daemon, ForceMiss) == []


def test_the_engine_must_be_named_where_there_are_several_or_none(force: Force, daemon: FakeDaemon) -> None:
    rows = daemon.answers[query.ListEngines](query.ListEngines())
    assert isinstance(rows, query.EngineList)
    here = next(row for row in rows.rows if row.scheduler)
    other = msgspec.structs.replace(here, engine=msgspec.structs.replace(here.engine, engine_id="decode-9"))
    for given, said in (((here, other), "decode-0, decode-9"), ((), "no decoding engine")):
        daemon.answers[query.ListEngines] = lambda _, given=given: query.EngineList(rows=given)  # type: ignore[misc]
        code, error = force("--waiting")
        assert (code, said in error["message"]) == (2, True), error


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        ("KVD-FORCE-POLICY", 5),
        ("KVD-FORCE-ROLE", 5),
        ("KVD-FORCE-BUSY", 5),
        ("KVD-NOT-PERMITTED", 6),
        ("KVD-FORCE-UNKNOWN", 1),
        ("KVD-FORCE-LATE", 1),
        ("KVD-FORCE-PART", 2),
    ],
)
def test_refusals_have_their_exit_codes(force: Force, daemon: FakeDaemon, refusal: str, code: int) -> None:
    daemon.answers[ForceMiss] = lambda _: Refused(code=refusal, message="no", hint="do that")
    ended, error = force("cmpl-4", "--yes", "--wait")
    assert (ended, error["code"], error["hint"]) == (code, refusal, "do that")
    assert asked(daemon, GetForced) == []


def test_with_yes_the_order_is_shown_and_how_to_follow_it(run: Run, daemon: FakeDaemon) -> None:
    daemon.answers |= {**ANSWERS, GetForced: lambda _: forced(miss(state="forced", steps=1))}
    outcome = run("force-miss", "cmpl-4", "--yes", "-o", "json", "--socket", daemon.directory)
    body = json.loads(outcome.out)
    assert (outcome.code, body["order_id"], body["uid"], body["pid"]) == (0, ORDER, 0, 4711)
    assert [request["state"] for request in body["requests"]] == ["forced"]
    assert f"kvctl force-miss --order {ORDER} --wait" in outcome.err


def test_it_follows_to_the_end(force: Force, daemon: FakeDaemon) -> None:
    steps = itertools.chain(
        (forced(), forced(miss(state="forced", steps=1)), forced(miss(state="reported", steps=3))),
        itertools.repeat(forced(miss())),
    )
    daemon.answers[GetForced] = lambda _: next(steps)
    code, body = force("cmpl-4", "--yes", "--wait")
    assert code == 0
    (request,) = body["requests"]
    assert (request["state"], request["kept"], request["recomputed"]) == ("recovered", 0, 1024)
    assert list(request["steps"]) == ["forced", "quiesced", "reported", "rescheduled", "first_token"]
    assert body["recovery_p50"] == pytest.approx(0.406)
    questions = asked(daemon, GetForced)
    assert [question.revision for question in questions] == [-1, 0, 1, 1]


def test_an_order_for_further_loads_is_over_when_it_is_closed_and_all_have_ended(
    force: Force, daemon: FakeDaemon
) -> None:
    states = iter(
        (
            forced(open=True, taken=0),
            forced(miss(1), open=True, looked=2),
            forced(miss(1), taken=2, looked=3),
            forced(miss(1), miss(2), taken=2, looked=3),
        )
    )
    daemon.answers[GetForced] = lambda _: next(states)
    code, body = force("--next", "3", "--ratio", "0.5", "--yes", "--wait")
    assert (code, body["taken"], body["recovered"], body["looked"]) == (0, 2, 2, 3)


@pytest.mark.parametrize(
    ("seen", "code", "said"),
    [
        (forced(miss(state="late", steps=1)), 1, "cmpl-4 (late)"),
        (forced(miss(state="over", steps=3)), 1, "cmpl-4 (over)"),
        (forced(miss(state="forced", steps=1), gone="it was started again"), 1, "it was started again"),
        (forced(miss(state="forced", steps=1)), 4, "0 of 1 have recovered"),
        (forced(open=True, taken=0), 4, "--clear"),
    ],
    ids=["late", "over", "gone", "time ran out", "still open"],
)
def test_what_did_not_recover_is_1_and_what_takes_too_long_is_4_after_the_document(
    run: Run, daemon: FakeDaemon, seen: Message, code: int, said: str
) -> None:
    daemon.answers |= {**ANSWERS, GetForced: lambda _: seen}
    words = ("cmpl-4", "--yes", "--wait", "--timeout", "800ms", "-o", "json")
    outcome = run("force-miss", *words, "--socket", daemon.directory)
    assert outcome.code == code
    assert json.loads(outcome.out)["kind"] == "ForcedMiss"
    assert said in json.loads(outcome.err)["message"]


def test_a_kvd_that_was_started_again_is_asked_until_it_knows_the_order(
    force: Force, daemon: FakeDaemon
) -> None:
    unknown = Refused(code="KVD-ORDER-UNKNOWN", message="not known")
    states = iter((forced(), unknown, forced(miss())))
    daemon.answers[GetForced] = lambda _: next(states)
    code, body = force("cmpl-4", "--yes", "--wait")
    assert (code, body["recovered"]) == (0, 1)


def test_an_order_can_be_looked_at_later_and_orders_are_ended(force: Force, daemon: FakeDaemon) -> None:
    code, body = force("--order", ORDER)
    assert (code, body["recovered"]) == (0, 1)
    code, error = force("--order", "nope")
    assert (code, error["code"]) == (1, "KVD-ORDER-UNKNOWN")
    code, body = force("--clear")
    assert (code, body["order_ids"]) == (0, [ORDER])
    assert asked(daemon, ClearForced) == [ClearForced(engine_id="decode-0")]


def test_where_no_order_is_open_that_is_said(run: Run, daemon: FakeDaemon) -> None:
    daemon.answers[ClearForced] = lambda _: ForcedCleared(order_ids=())
    outcome = run("force-miss", "--clear", "--socket", daemon.directory)
    assert (outcome.code, "decode-0 has no order for further loads" in outcome.err) == (0, True)


def test_the_screen_shows_the_plan_and_then_the_timeline(run: Run, daemon: FakeDaemon) -> None:
    daemon.answers |= ANSWERS
    plan = run("force-miss", "--waiting", "--socket", daemon.directory)
    assert plan.err == "kvctl: nothing was done; add --yes to do it\n"
    for request in WAITING:
        line = next(line for line in plan.out.splitlines() if line.startswith(request.request_id))
        assert line.split()[1:5] == [
            "prefill-1", str(request.tokens), str(request.keeps), str(request.recomputes),
        ]  # fmt: skip
    done = run("force-miss", "cmpl-4", "--yes", "--wait", "--socket", daemon.directory)
    assert "by uid 0, pid 4711" in done.out
    line = next(line for line in done.out.splitlines() if line.startswith("cmpl-4"))
    assert line.split() == [
        "cmpl-4", "prefill-1", "recovered", "4.00", "ms", "6.20", "ms", "8.10", "ms", "8.30", "ms", "410", "ms",
        "0", "1024",
    ]  # fmt: skip


def test_an_engine_that_takes_no_orders_is_told_with_what_to_do(run: Run, daemon: FakeDaemon) -> None:
    daemon.answers[ForceMiss] = lambda _: Refused(
        code="KVD-NOT-TAKEN", message="d's scheduler takes no force_miss"
    )
    outcome = run("force-miss", "--next", "1", "--engine", "decode-0", "--socket", daemon.directory)
    assert outcome.code == 5
    assert "kvctl demo without --simulate" in outcome.err
