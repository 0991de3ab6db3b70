"""`TransferTopology`: registration, and answers about one pair of workers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from kvd.geometry.model import EngineGeometry
from kvd.geometry.rank import Rank
from kvd.topology.errors import UnknownEngine
from kvd.topology.transfer_topology import TransferTopology
from tests.support.raising import raises
from tests.support.samples import engine, gated_delta_net, latent, llama

ONE = ("layers.0",)


def topology(tp: int, rank: int) -> TransferTopology:
    return TransferTopology(engine("d", ("full", 64, None, llama(ONE, block=64)), tp=tp), Rank(tp=rank))


def test_a_generation_registers_once_and_a_new_one_replaces_it() -> None:
    here = topology(4, 0)
    remote = engine("p", ("full", 16, None, llama(ONE)), tp=8)
    first = here.register_remote_engine(remote)
    before = here.remote("p").plan
    assert here.register_remote_engine(remote) is first
    assert here.remote("p").plan is before
    newer = replace(engine("p", ("full", 16, None, llama(ONE)), tp=2), generation="p-2")
    assert here.register_remote_engine(newer) is here.find("p") is not first
    assert first.plan is before, "whoever works with the old generation goes on with its plan"
    assert here.remote("p").geometry is newer
    assert here.remote("p").plan is not before


def test_four_ranks_that_read_from_eight_know_whom_to_connect_to() -> None:
    here = topology(4, 1)
    metadata = {Rank(tp=tp): f"of {tp}".encode() for tp in range(8)}
    remote = here.register_card(
        "p", "g", lambda: engine("p", ("full", 16, None, llama(ONE)), tp=8), lambda: metadata
    )
    assert remote.handshake_targets == {Rank(tp=2): b"of 2", Rank(tp=3): b"of 3"}


def test_questions_that_have_no_answer_are_typed_errors() -> None:
    here = topology(4, 0)
    with raises("KVD-TOPOLOGY-UNKNOWN-ENGINE", match="nobody"):
        here.remote("nobody")
    with raises("KVD-TOPOLOGY-UNKNOWN-ENGINE", match="tp9"):
        TransferTopology(here.local, Rank(tp=9))
    here.register_remote_engine(engine("p", ("full", 16, None, llama(ONE)), tp=8))
    here.forget_remote_engine("p")
    with raises("KVD-TOPOLOGY-UNKNOWN-ENGINE"):
        here.remote("p")


def test_an_engine_is_never_its_own_peer() -> None:
    here = topology(4, 0)
    with raises("KVD-TOPOLOGY-OWN-ENGINE", match="engine d is this engine itself"):
        here.register_remote_engine(here.local)
    assert here.find("d") is None


def test_only_the_generation_that_is_named_is_forgotten() -> None:
    here = topology(4, 0)
    remote = here.register_remote_engine(engine("p", ("full", 16, None, llama(ONE)), tp=8))
    here.forget_remote_engine("p", "another")
    assert here.find("p") is remote
    here.forget_remote_engine("p", remote.generation)
    assert here.find("p") is None


def test_a_card_is_read_and_planned_once_however_many_threads_ask() -> None:
    here, reads = topology(4, 1), []
    geometry = engine("p", ("full", 16, None, llama(ONE)), tp=8)

    def read() -> EngineGeometry:
        reads.append(1)
        return geometry

    remote = here.register_card("p", "g", read, dict)
    assert not reads, "nobody has asked yet"
    with ThreadPoolExecutor(8) as threads:
        plans = list(threads.map(lambda _: here.remote("p").plan, range(32)))
    assert reads == [1]
    assert all(plan is remote.plan for plan in plans)


def test_layers_that_are_read_and_written_are_planned_once_for_each_rank() -> None:
    here = topology(4, 1)
    remote = here.register_remote_engine(engine("p", ("full", 16, None, llama(ONE)), tp=8))
    assert remote.layer_reads(Rank(tp=2)) is remote.layer_reads(Rank(tp=2))
    assert set(remote.layer_reads(Rank(tp=2))) == set(ONE)
    assert remote.layer_reads(Rank(tp=0)) == {}
    assert set(remote.pushes(Rank(tp=3))) == set(ONE)
    with pytest.raises(UnknownEngine, match="it has no worker tp9"):
        remote.pushes(Rank(tp=9))


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        (
            ("full", 16, None, llama(ONE)),
            "group 0 full: blocks of 16 from 16, 16384 bytes a layer, heads 0..1",
        ),
        (("mla", 16, None, latent(ONE)), "group 0 mla: blocks of 16 from 16, 73728 bytes a layer"),
        (
            ("sliding", 16, 64, llama(ONE)),
            "group 0 sliding: blocks of 16 from 16, 16384 bytes a layer, heads 0..1",
        ),
        (("mamba", 16, None, gated_delta_net(ONE)), "group 0 mamba: states, 67072 bytes a layer"),
    ],
    ids=["dense", "mla", "sliding", "mamba"],
)
def test_one_line_says_who_reads_what_from_whom(groups: tuple[Any, ...], says: str) -> None:
    here = TransferTopology(engine("d", groups, tp=4), Rank(tp=0))
    here.register_remote_engine(engine("p", groups, tp=4))
    assert (
        here.remote("p").describe_line()
        == f"tp0 of d (tp4) reads from tp0 of p (tp4, generation p-1); {says}"
    )
