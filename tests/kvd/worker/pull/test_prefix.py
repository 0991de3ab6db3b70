"""What is kept of a load that missed: the tokens whose pieces came, and a smaller claim where vLLM keeps nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from kvd.backends.errors import PeerMetadataError
from kvd.backends.memory import MemoryLane
from kvd.topology.blocks import BlockList
from kvd.topology.copies import compile_request
from kvd.topology.plan import Plan
from kvd.vllm.memory.groups import GroupFacts, keeps_prefix
from kvd.wire.handshake import PeerGone
from kvd.wire.lease import LeaseRelease
from kvd.worker.orders import Fault, LoadOrder, StepOutcomes
from kvd.worker.settings import ConnectorSettings
from tests.support.rigs.bench import (
    SlidingWindowSpec,
    cache_config,
    eventually,
    full,
    order,
    prefill,
    ready,
    why,
)
from tests.support.rigs.half import Engine, from_prefiller
from tests.support.rigs.pull import BLOCKS, Rig

WINDOWED = (GroupFacts("sliding_window", 4, window=8), GroupFacts("full", 4))


A_PIECE_FOR_EACH_BLOCK = ConnectorSettings(backend="memory", piece_bytes=1, probe=False)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(settings=A_PIECE_FOR_EACH_BLOCK)
    made.script.push(ready(made.card))
    yield made
    made.close()


@pytest.fixture
def two_groups() -> Iterator[Rig]:
    """A full group and one with a window of 8 tokens, in blocks of 4."""
    window = SlidingWindowSpec(block_size=4, num_kv_heads=2, head_size=4, head_size_v=4, sliding_window=8)
    config = cache_config(BLOCKS, (full(), ("l0",)), (window, ("l1",)))
    made = Rig(config, A_PIECE_FOR_EACH_BLOCK)
    made.script.push(ready(made.card))
    yield made
    made.close()


REMOTE = prefill(((5, 6, 7, 8),), tokens=15)


def test_blocks_that_came_before_the_miss_are_good(rig: Rig) -> None:
    rig.faults.hold = {2}
    rig.start(order(REMOTE, (1, 2, 3, 4)))
    rig.expire(pieces=2)
    results = rig.results()
    assert results.failed == {"d-1"}
    assert results.bad_blocks == {3, 4}
    assert rig.same((1, 2), (5, 6))


def test_a_backend_that_is_too_quick_for_pieces_gets_the_load_whole(rig: Rig) -> None:
    rig.backend.traits = replace(rig.backend.traits, least_piece=1 << 30)
    rig.faults.hold = {1, 2, 3}
    rig.start(order(REMOTE, (1, 2, 3, 4)))
    assert rig.results().failed == set()
    assert rig.same((1, 2, 3, 4), (5, 6, 7, 8))


def test_a_piece_behind_the_one_that_is_missing_is_not(rig: Rig) -> None:
    rig.faults.hold = {0}
    rig.start(order(REMOTE, (1, 2, 3, 4)))
    rig.expire()
    assert rig.results().bad_blocks == {1, 2, 3, 4}


def test_blocks_that_were_here_before_are_not_counted(rig: Rig) -> None:
    rig.faults.hold = {2}
    rig.start(replace(order(REMOTE), groups={0: (1, (2, 3, 4))}, computed=4))
    rig.expire(pieces=2)
    assert rig.results().bad_blocks == {4}
    assert rig.same((2, 3), (6, 7))


def test_only_what_is_missing_is_read_again_on_a_new_lane(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = []
    submit = MemoryLane.submit

    def noted(lane: MemoryLane, *arguments: object) -> object:
        submitted.append(arguments)
        return submit(lane, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryLane, "submit", noted)
    rig.faults.fail_after = {2: 0}
    rig.start(order(REMOTE, (1, 2, 3, 4)))
    assert rig.results().failed == set()
    assert rig.same((1, 2, 3, 4), (5, 6, 7, 8))
    assert len(submitted) == 4 + 2


# --- one piece is planned while those before it move ---


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is compiled and submitted, in that order."""
    noted: list[str] = []
    submit = MemoryLane.submit

    def compiling(*arguments: Any, **more: Any) -> Any:
        noted.append("compile")
        return compile_request(*arguments, **more)

    def submitting(*arguments: Any) -> Any:
        noted.append("submit")
        return submit(*arguments)

    monkeypatch.setattr("kvd.worker.pull.pieces.compile_request", compiling)
    monkeypatch.setattr(MemoryLane, "submit", submitting)
    return noted


def test_a_slice_is_submitted_before_the_next_is_compiled(rig: Rig, events: list[str]) -> None:
    rig.start(order(REMOTE, (1, 2, 3, 4)))
    assert rig.results().failed == set()
    assert rig.same((1, 2, 3, 4), (5, 6, 7, 8))
    assert events == ["compile", "submit"] * 4


def test_what_is_planned_between_the_posts_counts_as_posting(rig: Rig) -> None:
    rig.start(order(REMOTE, (1, 2, 3, 4)))
    rig.results()
    (record,) = eventually(rig.records)
    stages, moments = record.stages, record.moments
    assert stages["plan"] <= moments["planned"] <= moments["posting"]
    assert stages["post"] == pytest.approx(moments["posted"] - moments["posting"])
    assert stages["plan"] + stages["post"] + stages["wire"] <= moments["reported"]


@pytest.mark.parametrize("refused", [False, True])
def test_what_was_compiled_is_not_compiled_again_on_a_new_lane(
    rig: Rig, events: list[str], refused: bool
) -> None:
    """Neither where all was posted nor where only a part was."""
    if refused:
        rig.faults.refuse = {2}
    else:
        rig.faults.fail_after = {2: 0}
    rig.start(order(REMOTE, (1, 2, 3, 4)))
    assert rig.results().failed == set()
    assert rig.same((1, 2, 3, 4), (5, 6, 7, 8))
    assert events.count("compile") == 4
    assert events.count("submit") == (3 + 4 if refused else 4 + 2)


ONE_TOO_FAR = prefill(((5, 6, 7, BLOCKS),), tokens=15)


def test_blocks_of_a_later_slice_that_do_not_fit_are_a_miss_once_nothing_can_land(
    rig: Rig, events: list[str]
) -> None:
    rig.faults.late = {0}
    rig.start(order(ONE_TOO_FAR, (1, 2, 3, 4)))
    results = rig.results()
    assert (results.failed, results.bad_blocks) == ({"d-1"}, {1, 2, 3, 4})
    assert f"only {BLOCKS} blocks" in rig.causes()["d-1"]
    assert rig.gates.closed == 1
    rig.faults.release(0)
    assert rig.untouched(1, 2, 3, 4), "the lane was gone before the report"
    assert events.count("submit") == 3, "it is not tried again"


def test_such_a_load_is_recorded_as_far_as_it_was_planned(rig: Rig) -> None:
    rig.start(order(ONE_TOO_FAR, (1, 2, 3, 4)))
    rig.results()
    rig.start(order(REMOTE, (1, 2, 3, 4), request_id="d-2"))
    rig.results()
    missed, whole = eventually(lambda: (found := rig.records())[1:] and found)
    assert (missed.state, missed.bytes, missed.groups) == ("miss", whole.bytes * 3 // 4, whole.groups)
    assert (missed.stages["post"], missed.stages["wire"]) == (0.0, 0.0)
    assert "posting" in missed.moments
    assert "posted" not in missed.moments


def test_others_on_the_lane_of_such_a_load_start_over(rig: Rig) -> None:
    rig.faults.hold = {0}
    rig.start(order(prefill(((9,),), tokens=4), (9,), request_id="other"), order(ONE_TOO_FAR, (1, 2, 3, 4)))
    assert rig.results(2).failed == {"d-1"}
    assert rig.same((9,), (9,))


def test_an_error_that_nobody_foresaw_in_a_later_slice_costs_that_load_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiling(plan: Plan, local: Mapping[int, BlockList], *rest: Any, **more: Any) -> Any:
        if local[0].first == 2:
            raise ValueError("a fault of planning")
        return compile_request(plan, local, *rest, **more)

    monkeypatch.setattr("kvd.worker.pull.pieces.compile_request", compiling)
    rig.faults.hold = {0}
    rig.start(order(prefill(((9,),), tokens=4), (9,), request_id="other"), order(REMOTE, (1, 2, 3, 4)))
    results = rig.results(2)
    assert (results.failed, results.bad_blocks) == ({"d-1"}, {1, 2, 3, 4})
    assert rig.causes()["d-1"] == "ValueError: a fault of planning"
    assert rig.same((9,), (9,))


def test_of_a_forced_miss_after_a_part_the_second_half_is_never_compiled(rig: Rig, events: list[str]) -> None:
    fault = Fault(why("forced"), "layers")
    rig.start(replace(order(REMOTE, (1, 2, 3, 4)), fault=fault))
    assert rig.results().bad_blocks == {3, 4}
    assert rig.same((1, 2), (5, 6))
    assert rig.untouched(3, 4)
    assert events == ["compile", "submit"] * 2


# --- what is too late or hopeless ---


def test_what_comes_after_the_deadline_is_nothing_to_rely_on(rig: Rig) -> None:
    """The lease may have ended: those bytes may be another request's."""
    go_on, reached = rig.gates.stop("poll")
    rig.start(order(REMOTE, (1, 2, 3, 4)))
    assert reached.wait(10)
    rig.expire()
    go_on.set()
    assert rig.results().bad_blocks == {1, 2, 3, 4}


def test_metadata_that_the_backend_does_not_take_is_not_tried_three_times(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    eventually(lambda: rig.decoder._peers.pull_threads["p"].lanes.now)
    tried = []

    def stale(*_: object) -> None:
        tried.append(1)
        raise PeerMetadataError("of another version")

    rig.faults.fail_after = {0: 0}
    monkeypatch.setattr(MemoryLane, "add", stale)
    rig.start(order(REMOTE, (1, 2, 3, 4)))
    assert rig.results().failed == {"d-1"}
    assert rig.causes() == {"d-1": "of another version"}
    assert len(tried) == 1


# --- several groups ---


def windowed(tokens: int, first: int) -> LoadOrder:
    """A load of four full blocks, and of windowed ones from number ``first``."""
    remote = prefill(((5, 6, 7, 8), (9, 10, 11, 12)[first:]), tokens=tokens, first=(0, first))
    groups = {0: (0, (1, 2, 3, 4)), 1: (first, (10, 11, 12, 13)[first:])}
    return replace(order(remote, seconds=60.0), groups=groups)


def test_a_shorter_prefix_may_be_claimed_whose_window_is_offered(two_groups: Rig) -> None:
    two_groups.faults.hold = {3}
    two_groups.start(windowed(15, 1))
    two_groups.expire(pieces=3)
    two_groups.results()
    outcomes = two_groups.decoder.outcomes()
    assert outcomes is not None
    assert outcomes.prefixes == {"d-1": 12}


def test_none_whose_window_the_prefiller_let_go(two_groups: Rig) -> None:
    two_groups.faults.hold = {3}
    two_groups.start(windowed(16, 2))
    two_groups.expire(pieces=3)
    two_groups.results()
    outcomes = two_groups.decoder.outcomes()
    assert outcomes is not None
    assert outcomes.prefixes == {"d-1": 0}


def test_none_of_a_peer_that_is_gone(two_groups: Rig) -> None:
    two_groups.faults.hold = {3}
    two_groups.start(windowed(15, 1))
    eventually(lambda: any(load.pieces.done for load in two_groups.decoder.loads.begun.values()))
    two_groups.script.push(PeerGone(engine_id="p", generation="gen-1", reason="killed"))
    two_groups.results()
    outcomes = two_groups.decoder.outcomes()
    assert outcomes is not None
    assert outcomes.prefixes == {"d-1": 0}


def missed(engine: Engine, prefix: int) -> None:
    engine.half.loads_ended({"r"}, StepOutcomes(loads={"r": why("too slow")}, prefixes={"r": prefix}))


def claimed(
    prefixes: tuple[int, ...], policy: str = "recompute", groups: tuple[GroupFacts, ...] = WINDOWED
) -> tuple[Engine, list[int]]:
    """Claims of a request whose loads miss one after the other, with those prefixes."""
    engine = Engine("d", groups, policy)
    request = engine.arrive(from_prefiller(10, ((5, 6, 7),) * len(groups)))
    engine.answer()
    made = []
    for prefix in prefixes:
        count, _ = engine.half.matched_tokens(request, 0)
        made.append(count or 0)
        if count:
            engine.half.allocated(request, ([1, 2, 3],) * len(groups), count)
            missed(engine, prefix)
    made.append(engine.half.matched_tokens(request, 0)[0] or 0)
    return engine, made


def test_less_is_claimed_after_a_miss_and_the_lease_is_kept_for_it() -> None:
    engine, made = claimed((8,))
    assert made == [10, 8]
    assert engine.script.told(LeaseRelease) == []


def test_the_same_claim_is_never_made_twice() -> None:
    engine, made = claimed((8, 8))
    assert made == [10, 8, 0]
    assert [released.result for released in engine.script.told(LeaseRelease)] == ["miss"]


def test_claims_end_after_two_more() -> None:
    engine, made = claimed((8, 7, 6))
    assert made == [10, 8, 7, 0]
    assert len(engine.script.told(LeaseRelease)) == 1


@pytest.mark.parametrize(("policy", "groups"), [("fail", WINDOWED), ("recompute", (GroupFacts("full", 4),))])
def test_nothing_is_claimed_where_the_request_has_failed_or_vllm_keeps_the_prefix(
    policy: str, groups: tuple[GroupFacts, ...]
) -> None:
    _, made = claimed((8,), policy, groups)
    assert made == [10, 0]


def test_the_worker_with_the_shortest_prefix_decides() -> None:
    one = StepOutcomes(loads={"r": why("slow")}, prefixes={"r": 12})
    other = StepOutcomes(loads={"r": None})
    third = StepOutcomes(loads={"r": why("slow")}, prefixes={"r": 8})
    assert one.merge(other).merge(third).prefixes == {"r": 8}


@pytest.mark.parametrize(
    ("groups", "kept"),
    [
        ((GroupFacts("full", 4),), True),
        ((GroupFacts("mla", 4),), True),
        ((GroupFacts("sliding_window", 4, window=8),), False),
        ((GroupFacts("mamba", 4),), False),
        (WINDOWED, False),
    ],
)
def test_vllm_keeps_a_prefix_only_of_a_group_that_keeps_all_blocks(
    groups: tuple[GroupFacts, ...], kept: bool
) -> None:
    assert keeps_prefix(groups) is kept
