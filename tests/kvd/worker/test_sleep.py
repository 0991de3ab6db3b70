"""A worker whose KV memory goes and comes back: nothing of its old life touches it, and nothing stays unreported."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvd.backends.memory import open_backend
from kvd.client.session import KvdSession
from kvd.vllm.memory.tensors import sibling_geometries, worker_geometry
from kvd.worker import worker as halves
from kvd.worker.cause import SHUTTING_DOWN
from kvd.worker.orders import StepOrders
from kvd.worker.settings import ConnectorSettings
from kvd.worker.worker import WorkerHalf
from tests.support import daemons as kvds
from tests.support.raising import raises
from tests.support.rigs.bench import (
    cache_config,
    eventually,
    full,
    groups_of,
    order,
    place,
    prefill,
    ready,
)
from tests.support.rigs.dense import REQUEST, announce, dense
from tests.support.rigs.pull import BLOCKS, ELEMENTS, Buffer, Rig, gather, memory
from tests.support.rigs.send import sending, step


def test_loads_that_were_under_way_fail_in_the_next_life(rig: Rig) -> None:
    rig.faults.hold.add(0)
    asking = prefill(((5, 6),), request_id="p-2", engine_id="q")
    rig.start(order(prefill(((5, 6),)), (2, 9)), order(asking, (3, 4), request_id="d-2"))
    eventually(lambda: rig.gates.opened and rig.decoder.loads.begun["d-1"].times.posted)

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
    monkeypatch.setattr(halves, "CLOSE_SECONDS", 1.0)
    go_on, reached = rig.gates.stop("submit")
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    assert reached.wait(10)
    with raises("KVD-CONNECTOR", match=r"cannot be given up: transfers are stuck \(p\)"):
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


def test_memory_stays_while_a_stuck_call_may_touch_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody else has it any more: what would be there next is not ours to write into."""
    monkeypatch.setattr(halves, "CLOSE_SECONDS", 1.0)
    rig = Rig()
    rig.script.push(ready(rig.card))
    go_on, reached = rig.gates.stop("submit")
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    assert reached.wait(10)
    assert rig.decoder.close() == ["p"]

    its_memory = weakref.ref(rig.target)
    rig.prefiller.close()
    del rig
    gc.collect()
    assert its_memory() is not None

    go_on.set()
    eventually(lambda: gc.collect() >= 0 and its_memory() is None)


def over_memory(kvd: kvds.Daemon, name: str) -> tuple[Buffer, WorkerHalf]:
    """The memory and the worker of an engine, a client of that kvd."""
    config = cache_config(BLOCKS, (full(), ("l0", "l1")))
    groups, (buffer, tensors) = groups_of(config), memory(2)
    opens: Callable[..., Any] = partial(KvdSession, directory=kvd.directory, name=name)
    half = WorkerHalf(
        ConnectorSettings(backend="memory", probe=False),
        kvds.facts(name),
        worker_geometry(tensors, config, groups, place()),
        sibling_geometries(tensors, config, groups, place()),
        open_backend(name, options={}),
        opens,
        memory=tensors,
    )
    return buffer, half


def test_peers_hear_that_it_sleeps_and_of_another_generation_when_it_wakes() -> None:
    with (
        kvds.daemons() as (kvd,),
        kvds.session(kvd, kvds.scheduler(kvds.facts("p"))) as its_scheduler,
        kvds.session(kvd, kvds.scheduler(kvds.facts("d"))),
        contextlib.ExitStack() as closing,
    ):
        target, peer = over_memory(kvd, "d")
        closing.callback(peer.close)
        source, first = over_memory(kvd, "p")
        source[:] = np.arange(1, len(source) + 1)
        its_scheduler.wait(lambda state: bool(state.engine_generation), 20.0)
        before = its_scheduler.state.engine_generation
        load = order(prefill(((5, 6),), generation=before), (2, 9))
        peer.start(StepOrders(loads=[load]))
        assert gather(peer, 1).failed == set()
        of_p, of_d = (buffer.reshape(2, BLOCKS, ELEMENTS) for buffer in (source, target))
        assert (of_d[:, [2, 9]] == of_p[:, [5, 6]]).all()
        assert not np.delete(of_d, [2, 9], axis=1).any()

        results, outcomes = first.retire()
        eventually(lambda: peer.topology.find("p") is None)

        _, second = over_memory(kvd, "p")
        closing.callback(second.close)
        second.inherit(results, outcomes)
        its_scheduler.wait(lambda state: state.engine_generation not in ("", before), 20.0)
        back = eventually(lambda: peer.topology.find("p"), 20.0)
        assert back is not None
        assert back.generation == its_scheduler.state.engine_generation
