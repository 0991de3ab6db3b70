"""What benchmarks/gpu adds to vLLM's workers, on a worker of ours without vLLM."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvd.backends.contract import State, Transfer
from kvd.geometry.model import Axis, Field, Group, Layer, Page, Region, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.worker.cause import Cause
from kvd.worker.load import Load, LoadTimes
from kvd.worker.orders import LoadOrder
from kvd.worker.remote import RemotePrefill
from kvd.worker.reporting import Reporting

pytest.importorskip("torch")
from benchmarks.gpu import in_worker
from benchmarks.gpu.lanes import watch_lanes

MEMORY = np.arange(4 * 8, dtype=np.int16).reshape(4, 8)


def half() -> Any:
    """A worker's half without loads."""
    page = Page(16, (Field("k", "int16", 2, 0, (Axis("token", 0, 8, 1, 2),), ()),))
    group = Group(0, "full", 8, (Layer("layer", page, 0, 0, 16),))
    geometry = WorkerGeometry(Rank(), 4, (Region(MEMORY.ctypes.data, MEMORY.nbytes),), (group,))
    pushing = SimpleNamespace(begin=lambda _: True)
    in_step = InStep()
    return SimpleNamespace(geometry=geometry, _reporting=Reporting(), pushing=pushing, in_step=in_step)


class InStep:
    """Loads of a step that is about to be queued."""

    def __init__(self) -> None:
        self._begun: list[Load] = []
        self.joined: list[list[Load]] = []

    def join(self) -> None:
        loads, self._begun = self._begun, []
        self.joined.append(loads)
        for load in loads:
            if load.order.request_id == "not posted":
                load.drop(Cause("not in time", "TOO_LATE"))


def ended(name: str, cause: Cause | None = None) -> Load:
    """A load of a request that has ended."""
    prefill = RemotePrefill(
        engine_id="p", request_id=name, generation="g", host="p", port=1, tokens=12,
        blocks=((2, 1),), first_blocks=(0,), lease_seconds=0.0, lease_opened=0.0,
    )  # fmt: skip
    order = LoadOrder(name, prefill, {0: (0, (2, 1))}, tokens=12, seconds=1.0, claimed=0.0)
    return Load(order, LoadTimes(0.0), deadline=1.0, cause=cause)


def test_a_load_is_summed_up_before_it_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = half()
    monkeypatch.setattr(in_worker, "_connector", lambda: SimpleNamespace(_worker=found))
    worker = in_worker.Measured()
    assert worker.kvb_watch(sums=True)
    reporting = found._reporting
    reporting.note(ended("r"))
    reporting.note(ended("missed", Cause("not in time", "TOO_LATE")))
    early, _ = reporting.tell_early()
    assert (early, reporting.tell([]).received) == ({"r"}, {"missed"})
    (load,) = worker.kvb_loads()
    assert (load["request_id"], load["tokens"], load["spans"]) == ("r", 12, {"0": (0, 12)})
    assert load["sums"] == worker.kvb_sums({"0": [0, [2, 1]]}, {"0": [0, 12]})
    assert load["sums"] != worker.kvb_sums({"0": [0, [1, 2]]}, {"0": [0, 12]})
    assert worker.kvb_loads() == []


def test_a_load_that_its_step_uses_is_summed_up_before_that_is_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind the step a state would be another one."""
    found = half()
    monkeypatch.setattr(in_worker, "_connector", lambda: SimpleNamespace(_worker=found))
    worker = in_worker.Measured()
    assert worker.kvb_watch(sums=True)
    loads = [replace(one, order=replace(one.order, in_step=True)) for one in map(ended, ("r", "not posted"))]
    found.in_step._begun += loads
    found.in_step.join()
    assert found.in_step.joined == [loads]
    for one in loads:
        found._reporting.note(one)
    (load,) = worker.kvb_loads()
    assert load["request_id"] == "r"
    assert load["sums"] == worker.kvb_sums({"0": [0, [2, 1]]}, {"0": [0, 12]})


def test_blocks_of_what_is_pushed_are_kept_until_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = half()
    monkeypatch.setattr(in_worker, "_connector", lambda: SimpleNamespace(_worker=found))
    worker = in_worker.Measured()
    worker.kvb_watch(sums=False)
    step = SimpleNamespace(transfer_id="t", groups={0: (0, (3, 1))})
    over = SimpleNamespace(transfer_id="t", groups={})
    assert found.pushing.begin(SimpleNamespace(pushes=[step]))
    assert found.pushing.begin(SimpleNamespace(pushes=[over]))
    assert worker.kvb_pushed("t") == {"0": [0, (3, 1)]}


class Lane:
    """A lane that is done when it is first looked at."""

    __module__ = "kvd.backends.made_up"
    __slots__ = ()

    def add(self, peer: str, metadata: bytes) -> None: ...

    def submit(self, peer: str, descriptors: Any, operation: str = "read") -> Transfer:  # noqa: ARG002
        return Transfer(peer, 10, 1, None)

    def poll(self, transfer: Transfer) -> State:
        transfer.state = State.DONE
        return transfer.state

    def close(self) -> None: ...


class Backend:
    """Makes lanes."""

    __slots__ = ()

    def lane(self, name: str) -> Lane:  # noqa: ARG002
        return Lane()


def test_lanes_made_before_and_after_note_what_they_moved_once() -> None:
    notes: list[dict[str, Any]] = []
    worker = SimpleNamespace(_backend=Backend())
    lanes = [worker._backend.lane("before")]
    watch_lanes(worker, notes)
    lanes.append(worker._backend.lane("after"))
    for lane in lanes:
        transfer = lane.submit("peer", None)
        assert lane.poll(transfer) is lane.poll(transfer) is State.DONE
    assert [(note["what"], note["bytes"]) for note in notes] == [("moved", 10)] * 2
