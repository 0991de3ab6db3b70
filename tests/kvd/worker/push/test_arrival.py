"""What a push consists of, exactly what the prefilling workers send; and the phases that it goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.geometry.model import EngineGeometry
from kvd.geometry.rank import Rank
from kvd.topology.blocks import BlockList
from kvd.topology.plan import plan_worker
from kvd.topology.push import compile_chunk, plan_push
from kvd.wire.identity import Endpoint
from kvd.wire.push import PushKey
from kvd.worker.cause import Cause
from kvd.worker.load import Load, LoadTimes
from kvd.worker.orders import block_lists
from kvd.worker.push.arrival import AFTER, Arrival, ArrivalPhase, Part, expect
from tests.kvd.topology.test_oracle import THOROUGH, cases
from tests.support import oracle
from tests.support.rigs.push import PushRig, pushed

GIVEN_UP = Cause("nobody wants it", "REQUEST_OVER")

Case = tuple[EngineGeometry, EngineGeometry, int, oracle.Request]


@settings(THOROUGH, max_examples=min(60, THOROUGH.max_examples))
@given(cases())
def test_expected_is_what_has_bytes_to_send(case: Case) -> None:
    local, remote, rank, request = case
    plan = plan_worker(local.workers[rank], local.workers, remote.workers)
    parts: dict[Part, int] = {}
    for worker in remote.workers:
        source = worker.rank
        for layer, push in plan_push(local.workers[rank], local.workers, remote.workers, worker.rank).items():
            rows = compile_chunk(
                push, request.remote, request.local, total=request.tokens, first=0, last=request.tokens
            )
            if len(rows):
                parts[source, layer] = rows.nbytes
    expected = expect(plan, request.local, request.tokens)
    assert expected.parts == parts.keys()
    assert expected.bytes == sum(parts.values())
    assert expected.sources == {source for source, _ in parts}


def test_groups_without_blocks_expect_nothing() -> None:
    rig = PushRig()
    plan = plan_worker(
        rig.decoder.geometry, rig.decoder.topology.local.workers, [w.geometry for w in rig.p.workers]
    )
    nothing = {0: BlockList(0, np.zeros(0, np.int64))}
    for blocks in ({}, nothing):
        assert expect(plan, blocks, 8).parts == frozenset()
    rig.close()


@pytest.fixture(scope="module")
def make() -> Iterator[Callable[[], Arrival]]:
    """Makes arrivals of one block of a prefiller with one worker."""
    rig = PushRig()
    plan = plan_worker(
        rig.decoder.geometry, rig.decoder.topology.local.workers, [w.geometry for w in rig.p.workers]
    )
    order = pushed((2,), tokens=4)
    key = PushKey(transfer_id="x", prefiller="p", prefiller_endpoint=Endpoint(), decoder="d", rank=Rank(0))
    expected = expect(plan, block_lists(order.groups), order.tokens)

    def made() -> Arrival:
        arrival = Arrival(Load(order, LoadTimes(0.0), 30.0), plan, expected, key)
        arrival.reannounce(1.0)
        return arrival

    yield made
    rig.close()


def test_a_new_attempt_begins_from_nothing(make: Callable[[], Arrival]) -> None:
    arrival = make()
    arrival.sent(3, 1.0)
    arrival.mark_received(Rank(0), ("l0",), 2.0)
    arrival.mark_quiesced(Rank(0))
    arrival.reannounce(5.0)
    assert (arrival.left, arrival.quiesced) == (set(arrival.expected.parts), set())
    assert (arrival.key.attempt, arrival.announced, arrival.first) == (4, 1.0, 0.0)
    assert arrival.phase is ArrivalPhase.WAITING


def test_what_is_given_up_before_it_is_announced_has_nothing_that_can_land(
    make: Callable[[], Arrival],
) -> None:
    arrival = make()
    arrival.give_up(GIVEN_UP)
    assert arrival.phase is ArrivalPhase.UNWANTED
    assert not arrival.exposed


def test_what_is_given_up_after_it_was_announced_may_be_written_until_its_sources_are_quiet(
    make: Callable[[], Arrival],
) -> None:
    arrival = make()
    arrival.sent(1, 1.0)
    arrival.give_up(GIVEN_UP)
    assert arrival.phase is ArrivalPhase.WITHDRAWN
    assert arrival.exposed
    assert not arrival.silent
    arrival.mark_quiesced(Rank(0))
    assert arrival.silent


def test_an_acknowledgement_that_comes_after_the_withdrawal_changes_nothing_but_the_record(
    make: Callable[[], Arrival],
) -> None:
    arrival = make()
    arrival.sent(1, 1.0)
    arrival.give_up(GIVEN_UP)
    arrival.acknowledged(2.0)
    assert (arrival.phase, arrival.taken) == (ArrivalPhase.WITHDRAWN, 2.0)


CHANGES: dict[str, Callable[[Arrival], None]] = {
    "sent": lambda arrival: arrival.sent(arrival.key.attempt + 1, 2.0),
    "acknowledged": lambda arrival: arrival.acknowledged(2.0),
    "received": lambda arrival: arrival.mark_received(Rank(0), ("l0",), 2.0),
    "quiesced": lambda arrival: arrival.mark_quiesced(Rank(0)),
    "reannounce": lambda arrival: arrival.reannounce(2.0),
    "give up": lambda arrival: arrival.give_up(GIVEN_UP),
    "never quiesces": lambda arrival: arrival.never_quiesces(),
}


@given(changes=st.lists(st.sampled_from(sorted(CHANGES)), max_size=12))
def test_whatever_happens_in_whatever_order_an_arrival_goes_through_its_phases_by_the_table(
    make: Callable[[], Arrival], changes: list[str]
) -> None:
    arrival = make()
    for name in changes:
        before, attempt = arrival.phase, arrival.key.attempt
        refused = ""
        try:
            CHANGES[name](arrival)
        except RuntimeError as error:
            refused = str(error)
        if refused:
            assert f"is {before.value} and cannot be" in refused
            assert arrival.phase is before
            continue
        assert arrival.phase is before or arrival.phase in AFTER[before]
        assert bool(arrival.cause) == (arrival.phase in (ArrivalPhase.UNWANTED, ArrivalPhase.WITHDRAWN))
        assert arrival.left <= arrival.expected.parts
        assert arrival.key.attempt >= attempt, "words of an older attempt must never be taken for this one's"
        if name == "reannounce":
            assert (arrival.left, arrival.quiesced) == (set(arrival.expected.parts), set())
