"""`kvctl leases`: both sides of what prefillers keep, and what a release would do, does and leaves alone."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvd.wire import query
from kvd.wire.frame import Message
from kvd.wire.identity import Endpoint
from kvd.wire.order import EndLease, ForceMiss, LeaseEnding
from kvd.wire.reply import Refused
from tests.kvctl import order_answers
from tests.kvctl.conftest import FakeDaemon, Run

GIVEN = query.LeaseRow(
    engine_id="both-0", request_id="cmpl-4", age=2.0, left=28.0, readers=1, blocks=64,
    claims=(query.LeaseReader(who="decode-0", left=28.0),),
)  # fmt: skip
TAKEN = query.LeaseRow(
    engine_id="both-0", request_id="cmpl-4", reader="decode-0", age=1.0, left=28.0, readers=1,
    endpoint=Endpoint("10.0.0.8", 7766),
)  # fmt: skip
FREE = query.LeaseRow(engine_id="both-0", request_id="cmpl-9", age=9.0, left=21.0, blocks=8)


@pytest.fixture
def orders(daemon: FakeDaemon) -> list[EndLease | ForceMiss]:
    """What the kvd was ordered, in its order; it has three rows of leases."""
    given: list[EndLease | ForceMiss] = []

    def end(message: Message) -> Message:
        assert isinstance(message, EndLease)
        given.append(message)
        readers = 1 if message.request_id == "cmpl-4" else 0
        return LeaseEnding(
            engine_id=message.engine_id, request_id=message.request_id, blocks=8, readers=readers,
            seconds=28.0 * readers, carried_out=message.carry_out,
        )  # fmt: skip

    def force(message: Message) -> Message:
        assert isinstance(message, ForceMiss)
        given.append(message)
        return order_answers.force(message)

    daemon.answers |= {
        query.ListLeases: lambda _: query.LeaseList(rows=(TAKEN, FREE, GIVEN)),
        EndLease: end,
        ForceMiss: force,
    }
    return given


def test_both_sides_are_listed_the_oldest_first(
    run: Run, daemon: FakeDaemon, orders: list[EndLease | ForceMiss]
) -> None:
    document = json.loads(run("leases", "-o", "json", "--socket", daemon.directory).out)
    assert document["kind"] == "Leases"
    rows = [(x["request_id"], x["side"], x["state"], x["blocks"]) for x in document["leases"]]
    assert rows == [
        ("cmpl-9", "gives", "open", 8),
        ("cmpl-4", "gives", "claimed", 64),
        ("cmpl-4", "claims", "claimed", None),
    ]
    assert [x["held_by"] for x in document["leases"]] == [
        [], [{"name": "decode-0", "left": 28.0}], [{"name": "decode-0", "left": 28.0}],
    ]  # fmt: skip
    names = run("leases", "-o", "name", "--socket", daemon.directory).out
    assert names == "both-0/cmpl-9\nboth-0/cmpl-4\n"
    free = run("leases", "--unclaimed", "-o", "jsonl", "--socket", daemon.directory).out
    assert [json.loads(line)["request_id"] for line in free.splitlines()] == ["cmpl-9"]
    assert orders == []


def test_an_empty_list_says_so(run: Run, daemon: FakeDaemon) -> None:
    daemon.answers[query.ListLeases] = lambda _: query.LeaseList(rows=(), hidden=2)
    outcome = run("leases", "--engine", "p", "-o", "jsonl", "--socket", daemon.directory)
    assert (outcome.code, outcome.out) == (0, "")
    assert "no lease of p is open at this kvd" in outcome.err
    assert "2 leases of other users' engines are not shown" in outcome.err


def test_a_release_says_what_it_would_do_and_does_nothing(
    run: Run, daemon: FakeDaemon, orders: list[EndLease | ForceMiss]
) -> None:
    outcome = run("leases", "release", "both-0/cmpl-9", "--socket", daemon.directory)
    assert outcome.code == 0
    assert "its blocks are free at once; who comes for it computes" in outcome.out
    assert "nothing was done; add --yes to do it" in outcome.err
    assert [message.carry_out for message in orders] == [False]


def test_a_release_ends_the_lease_and_has_the_load_of_the_reader_here_miss(
    run: Run, daemon: FakeDaemon, orders: list[EndLease | ForceMiss]
) -> None:
    outcome = run("leases", "release", "cmpl-4", "--yes", "-o", "json", "--socket", daemon.directory)
    assert outcome.code == 0
    rows = json.loads(outcome.out)["released"]
    assert [(x["side"], x["effect"], x["recomputes"], x["carried_out"]) for x in rows] == [
        ("gives", "ends", None, True),
        ("claims", "misses", 1024, True),
    ]
    kinds = [(type(message), message.carry_out) for message in orders]
    assert kinds == [(EndLease, False), (ForceMiss, False), (EndLease, True), (ForceMiss, True)]


def test_nothing_is_done_where_the_reader_cannot_recover(
    run: Run, daemon: FakeDaemon, orders: list[EndLease | ForceMiss]
) -> None:
    daemon.answers[ForceMiss] = lambda _: Refused(code="KVD-FORCE-POLICY", message="its policy is fail")
    outcome = run("leases", "release", "cmpl-4", "--yes", "--socket", daemon.directory)
    assert (outcome.code, outcome.out) == (5, "")
    assert [message.carry_out for message in orders] == [False]


@pytest.mark.usefixtures("orders")
def test_a_load_that_is_complete_does_not_keep_the_lease_from_being_ended(
    run: Run, daemon: FakeDaemon
) -> None:
    daemon.answers[ForceMiss] = lambda _: Refused(code="KVD-FORCE-LATE", message="it is loaded")
    outcome = run("leases", "release", "cmpl-4", "--yes", "--socket", daemon.directory)
    assert outcome.code == 0
    assert "1 claim keeps what was promised, 28 s at most" in outcome.out.replace("28.0", "28")
    assert "of decode-0 nothing is to miss: it is loaded" in outcome.err
    daemon.answers[query.ListLeases] = lambda _: query.LeaseList(rows=(TAKEN,))
    alone = run("leases", "release", "cmpl-4", "--yes", "--socket", daemon.directory)
    assert (alone.code, alone.out) == (1, "")


def test_a_lease_that_is_not_there_is_1_and_one_of_two_engines_is_2(
    run: Run, daemon: FakeDaemon, orders: list[EndLease | ForceMiss]
) -> None:
    missing = run("leases", "release", "cmpl-5", "--socket", daemon.directory)
    assert (missing.code, "did you mean cmpl-" in missing.err) == (1, True)
    other = msgspec.structs.replace(FREE, engine_id="both-1")
    daemon.answers[query.ListLeases] = lambda _: query.LeaseList(rows=(FREE, other))
    two = run("leases", "release", "cmpl-9", "--socket", daemon.directory)
    assert two.code == 2
    assert "both-0, both-1 each have a lease 'cmpl-9'" in two.err
    assert orders == []


@pytest.mark.usefixtures("orders")
def test_options_count_before_and_after_the_word_release(run: Run, daemon: FakeDaemon) -> None:
    before = run("leases", "-o", "json", "--socket", daemon.directory, "release", "cmpl-9")
    assert json.loads(before.out)["kind"] == "ReleasedLeases"
