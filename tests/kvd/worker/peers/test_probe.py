"""The probe: a peer's null block is read as soon as the peer is known, and no load has to wait for it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from kvd.backends.contract import Transfer
from kvd.backends.memory import MemoryLane, open_backend
from kvd.client.cards import CardReader
from kvd.geometry.model import EngineGeometry, WorkerGeometry
from kvd.topology import rate as pace
from kvd.topology.descriptors import Descriptors, Int64
from kvd.topology.plan import plan_worker
from kvd.topology.transfer_topology import RemoteEngine
from kvd.wire.card_parts import ToldCard
from kvd.wire.handshake import PeerGone
from kvd.wire.transfer import ReportTransfers
from kvd.worker.peers import probe as probes
from kvd.worker.peers.followed import register
from kvd.worker.peers.probe import null_reads
from kvd.worker.settings import ConnectorSettings
from kvd.worker.worker import WorkerHalf
from tests.kvd.topology.test_oracle import THOROUGH, cases
from tests.support import oracle
from tests.support.rigs.bench import Script, eventually, facts, groups_of, order, prefill, ready
from tests.support.rigs.pull import BLOCKS, ELEMENTS, Rig

Case = tuple[EngineGeometry, EngineGeometry, int, oracle.Request]


@pytest.fixture
def probing() -> Iterator[Rig]:
    """Two workers that probe; the decoding one does not know the other yet."""
    made = Rig(settings=ConnectorSettings(backend="memory"))
    yield made
    made.close()


def introduce(rig: Rig, generation: str = "gen-1") -> None:
    rig.script.push(ready(rig.card, generation))


def load(rig: Rig, seconds: float = 10.0) -> None:
    rig.start(order(prefill(((5, 6),)), (2, 9), seconds=seconds))


def over(rig: Rig) -> bool:
    """Whether the lane's thread has probed and has nothing left to do."""
    thread = rig.decoder._peers.pull_threads["p"]
    return thread.probing.posted > 0 and not thread.probing.on and not thread._activity.now


def test_the_null_block_is_read_and_no_other(probing: Rig) -> None:
    introduce(probing)
    eventually(lambda: over(probing))
    assert probing.same((0,), (0,))
    assert probing.untouched(*range(1, BLOCKS))
    assert not probing.decoder.results().received
    assert not probing.script.told(ReportTransfers)


def test_the_first_load_goes_over_the_lane_that_was_probed(probing: Rig) -> None:
    introduce(probing)
    eventually(lambda: over(probing))
    load(probing)
    assert not probing.results().failed
    assert probing.same((2, 9), (5, 6))
    assert probing.gates.opened == 1


@pytest.mark.parametrize("how", ["by setting", "because it only prefills"])
def test_nothing_is_read_where_it_is_switched_off(how: str) -> None:
    rig = Rig(settings=ConnectorSettings(backend="memory", probe=how != "by setting"))
    script, half = rig.script, rig.decoder
    if how != "by setting":
        half.close()
        script = Script()
        backend = open_backend("d", options={"faults": rig.faults})
        prefills = msgspec.structs.replace(facts("d", len(groups_of(rig.config))), role="prefill")
        half = WorkerHalf(
            rig.decoder.settings,
            prefills,
            rig.decoder.geometry,
            (rig.decoder.geometry,),
            backend,
            script.open,
            memory=rig.target,
        )
    script.push(ready(rig.card))
    eventually(lambda: half._peers.pull_threads["p"].lanes.now)
    half.close()  # ends the lane's thread, which had all the time it wanted
    assert half._peers.pull_threads["p"].probing.posted == 0
    assert not rig.target.any()
    rig.close()


def test_a_load_that_waits_already_is_probe_enough(probing: Rig) -> None:
    go_on, reached = probing.gates.stop("add")
    introduce(probing)
    assert reached.wait(10)
    load(probing)
    go_on.set()
    assert not probing.results().failed
    assert probing.decoder._peers.pull_threads["p"].probing.posted == 0
    assert probing.untouched(0)


def test_a_probe_that_is_refused_is_said_and_the_first_load_tries_anew(
    probing: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    probing.faults.refuse = {0}
    introduce(probing)
    eventually(lambda: probing.gates.closed)
    load(probing)
    assert not probing.results().failed
    assert probing.gates.opened == 2
    (said,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "probe of peer p: its null block could not be read: " in said.getMessage()
    assert "submit 0 is to be refused" in said.getMessage()


def test_a_probe_that_fails_on_its_way_takes_its_lane_along(probing: Rig) -> None:
    probing.faults.late = {0}
    introduce(probing)
    eventually(lambda: probing.gates.closed)
    probing.faults.release(0)
    load(probing)
    assert not probing.results().failed
    assert probing.untouched(0)


def test_a_load_does_not_wait_for_a_probe_that_hangs(probing: Rig) -> None:
    probing.faults.hold = {0}
    introduce(probing)
    eventually(lambda: probing.decoder._peers.pull_threads["p"].probing.on)
    load(probing)
    assert not probing.results().failed
    assert probing.gates.opened == 1
    assert probing.decoder._peers.pull_threads["p"].probing.on


def test_a_probe_past_its_time_loses_its_lane(
    probing: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(probes, "PROBE_SECONDS", 0.02)
    probing.faults.hold = {0}
    introduce(probing)
    eventually(lambda: probing.gates.closed)
    assert "not complete within 0.02 s" in caplog.text
    load(probing)
    assert not probing.results().failed
    assert probing.untouched(0)


def test_a_probe_past_its_time_does_not_take_the_lane_from_under_a_load(probing: Rig) -> None:
    probing.faults.hold = {0, 1}
    introduce(probing)
    eventually(lambda: probing.decoder._peers.pull_threads["p"].probing.on)
    load(probing)
    thread = probing.decoder._peers.pull_threads["p"]
    eventually(lambda: thread._active)
    go_on, reached = probing.gates.stop("poll")
    assert reached.wait(10)
    thread.probing._deadline = 0.0
    for _ in range(4):  # whole rounds of the thread, in which it looks at the probe and at the load
        before = go_on
        go_on, reached = probing.gates.stop("poll")
        before.set()
        assert reached.wait(10)
    assert probing.gates.closed == 0
    go_on.set()
    probing.faults.release(1)
    assert not probing.results().failed
    eventually(lambda: probing.gates.closed)  # once nothing else is on it


def test_a_peer_that_goes_takes_its_probe_along(probing: Rig) -> None:
    probing.faults.hold = {0}
    introduce(probing)
    thread = probing.decoder._peers.pull_threads["p"]
    eventually(lambda: thread.probing.on)
    probing.script.push(PeerGone(engine_id="p", generation="gen-1", reason="killed"))
    eventually(lambda: probing.gates.closed)
    assert not thread.probing.on
    introduce(probing, "gen-2")
    eventually(lambda: probing.same((0,), (0,)))  # and its next generation is probed in its turn


def test_closing_ends_a_probe_that_hangs(probing: Rig) -> None:
    probing.faults.hold = {0}
    introduce(probing)
    eventually(lambda: probing.decoder._peers.pull_threads["p"].probing.on)
    probing.decoder.close()
    assert probing.gates.closed == 1
    assert probing.backend.closed


# --- measuring ---


@pytest.fixture
def measured(probing: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Memory that passes for a GPU's, and tiny rows for long ones."""
    monkeypatch.setattr(RemoteEngine, "devices", ("cuda:0", "cuda:1"))
    for module in (probes, pace):
        monkeypatch.setattr(module, "PIECE", 64)
    monkeypatch.setattr(pace, "PROBED_BYTES", 256)
    monkeypatch.setattr(probes, "READ_BYTES", 512)
    monkeypatch.setattr(probes, "BARE", 8)
    return probing


def test_a_slow_path_between_gpus_is_said_before_any_load(
    measured: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pace.Probed, "rate", property(lambda _: 0.5e9))
    introduce(measured)
    eventually(lambda: "SLOW_PATH: KV of p: between GPUs a probe of" in caplog.text)
    assert measured.script.told(ReportTransfers) == []


def test_nothing_is_said_of_a_fast_one(
    measured: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pace.Probed, "rate", property(lambda _: 50e9))
    introduce(measured)
    eventually(lambda: over(measured))
    assert next(measured.backend._inner.submits) == 1 + 2 * pace.ROUNDS
    assert "SLOW_PATH" not in caplog.text


def test_a_load_ends_the_measuring(measured: Rig) -> None:
    measured.faults.hold = {1}  # the first read that is measured
    introduce(measured)
    thread = measured.decoder._peers.pull_threads["p"]
    eventually(lambda: thread.probing._now)
    measured.faults.hold.add(2)  # the load
    load(measured)
    eventually(lambda: thread._active)
    measured.faults.release(1)
    eventually(lambda: not thread.probing.on)
    measured.faults.release(2)
    assert not measured.results().failed
    assert next(measured.backend._inner.submits) == 3


def test_the_fastest_read_tells_the_rate_where_the_device_told_its_time(
    measured: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = MemoryLane.submit
    took = itertools.chain((2e-3, 0.0, 1e-6), itertools.repeat(1e-3))

    def submitting(lane: MemoryLane, *arguments: Any) -> Transfer:
        transfer = submit(lane, *arguments)
        if seconds := next(took):
            transfer.detail["device_seconds"] = seconds
        reads.append(transfer)
        return transfer

    reads: list[Transfer] = []
    monkeypatch.setattr(MemoryLane, "submit", submitting)
    introduce(measured)
    eventually(lambda: over(measured))
    assert measured.decoder._peers.pull_threads["p"].probing.rate == reads[2].bytes / 1e-6
    introduce(measured, "gen-2")
    eventually(lambda: len(reads) > 1 + 2 * pace.ROUNDS and over(measured))
    assert measured.decoder._peers.pull_threads["p"].probing.rate < reads[2].bytes / 1e-6, "of now alone"


def test_measuring_is_bounded_by_bytes(measured: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "MEASURE_BYTES", 1)
    introduce(measured)
    eventually(lambda: over(measured))
    assert next(measured.backend._inner.submits) == 2


# --- what is read ---


@settings(THOROUGH, max_examples=min(25, THOROUGH.max_examples))
@given(cases())
def test_nothing_but_null_blocks_is_read_and_written_whatever_the_engines_are(case: Case) -> None:
    local, remote, rank, _ = case
    plan = plan_worker(local.workers[rank], local.workers, remote.workers)
    for position in plan.sources:
        for copies in null_reads(plan, position, selection=True):
            rows = copies.selection.descriptors() if copies.selection else copies.descriptors
            assert len(rows)
            assert inside_null(local.workers[rank], rows.local, rows)
            assert inside_null(remote.workers[position], rows.remote, rows)


def inside_null(worker: WorkerGeometry, addresses: Int64, rows: Descriptors) -> bool:
    """Whether each byte of each row is one of block 0; a row may span layers that stand side by side."""
    null: set[int] = set()
    for _, layer in worker.layers.values():
        first = worker.page_address(layer)
        null.update(range(first, first + layer.page.end))
    spans = zip(addresses.tolist(), rows.length.tolist(), strict=True)
    return all(null.issuperset(range(address, address + length)) for address, length in spans)


def test_a_row_of_each_layer_is_read(probing: Rig) -> None:
    remote = register(probing.decoder.topology, ToldCard(ready(probing.card).peer), CardReader())
    (copies,) = null_reads(remote.plan, 0, selection=False)
    assert copies.descriptors.nbytes == 2 * ELEMENTS * 2
