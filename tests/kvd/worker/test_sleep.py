"""A worker whose KV memory goes and comes back: nothing of its old life touches it, and nothing stays unreported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvd.backends.memory import open_backend
from kvd.client.session import KvdSession
from kvd.vllm.memory.tensors import sibling_geometries, worker_geometry
from kvd.worker import worker as halves
from kvd.worker.cause import SHUTTING_DOWN
from kvd.worker.errors import ConnectorError
from kvd.worker.orders import StepOrders
from kvd.worker.settings import ConnectorSettings
from kvd.worker.worker import WorkerHalf
from tests.support import daemons as kvds
from tests.support.rigs.bench import (
    cache_config,
    eventually,
    full,
    groups_of,
    order,
    place,
    prefill,
)
from tests.support.rigs.dense import REQUEST, announce, dense
from tests.support.rigs.pull import BLOCKS, Rig, gather, memory
from tests.support.rigs.send import sending, step


def test_loads_that_were_under_way_fail_in_the_next_life(rig: Rig) -> None:
    rig.faults.hold.add(0)
    asking = prefill(((5, 6),), request_id="p-2", engine_id="q")
    rig.start(order(prefill(((5, 6),)), (2, 9)), order(asking, (3, 4), request_id="d-2"))
    eventually(lambda: rig.gates.opened and rig.decoder._begun["d-1"].posted)

    results, outcomes = rig.decoder.retire()

    assert results.received == results.failed == {"d-1", "d-2"}
    assert results.bad_blocks == {2, 9, 3, 4}
    assert outcomes.loads == {"d-1": SHUTTING_DOWN, "d-2": SHUTTING_DOWN}
    assert SHUTTING_DOWN.code == "SHUTDOWN"
    assert (rig.script.closed, rig.backend.closed, rig.gates.closed) == (True, True, rig.gates.opened)
    rig.faults.release(0)
    assert rig.untouched(2, 9, 3, 4), "nothing lands any more"

    after = Rig()
    after.decoder.inherit(results, outcomes)
    assert after.decoder.results().failed == {"d-1", "d-2"}
    assert after.causes() == {"d-1": SHUTTING_DOWN.text, "d-2": SHUTTING_DOWN.text}
    assert after.decoder.results().failed == set(), "once"
    after.close()


def test_memory_that_a_transfer_may_still_touch_is_not_given_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "CLOSE_SECONDS", 0.1)
    go_on, reached = rig.gates.stop("submit")
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    assert reached.wait(10)
    with pytest.raises(ConnectorError, match=r"cannot be given up: transfers are stuck \(p\)"):
        rig.decoder.retire()
    assert not rig.backend.closed
    go_on.set()


def test_blocks_that_are_held_for_a_push_are_freed() -> None:
    with sending(dense("p"), dense("d")) as rig:
        rig.fill(REQUEST.remote)
        announce(rig)
        rig.run(step(REQUEST.remote, 40, 40))
        rig.end()
        assert not rig.all_sent("r"), "the decoder has not said that it has all"
        results, _ = rig.workers[0].half.retire()
        assert results.sent == {"r"}


def over_memory(kvd: kvds.Daemon, name: str) -> WorkerHalf:
    """The worker of an engine, a client of that kvd."""
    config = cache_config(BLOCKS, (full(), ("l0", "l1")))
    groups, (_, tensors) = groups_of(config), memory(2)
    opens: Callable[..., Any] = partial(KvdSession, directory=kvd.directory, name=name)
    return WorkerHalf(
        ConnectorSettings(backend="memory", probe=False),
        kvds.facts(name),
        worker_geometry(tensors, config, groups, place()),
        sibling_geometries(tensors, config, groups, place()),
        open_backend(name, options={}),
        opens,
    )


def test_peers_hear_that_it_sleeps_and_of_another_generation_when_it_wakes() -> None:
    with (
        kvds.daemons() as (kvd,),
        kvds.session(kvd, kvds.scheduler(kvds.facts("p"))) as its_scheduler,
        kvds.session(kvd, kvds.scheduler(kvds.facts("d"))),
        contextlib.closing(over_memory(kvd, "d")) as peer,
    ):
        first = over_memory(kvd, "p")
        its_scheduler.wait(lambda state: bool(state.engine_generation), 20.0)
        before = its_scheduler.state.engine_generation
        load = order(prefill(((5, 6),), generation=before), (2, 9))
        peer.start(StepOrders(loads=[load]))
        assert gather(peer, 1).failed == set()

        results, outcomes = first.retire()
        eventually(lambda: peer.topology.find("p") is None)

        with contextlib.closing(over_memory(kvd, "p")) as second:
            second.inherit(results, outcomes)
            its_scheduler.wait(lambda state: state.engine_generation not in ("", before), 20.0)
            back = eventually(lambda: peer.topology.find("p"), 20.0)
            assert back is not None
            assert back.generation == its_scheduler.state.engine_generation
