"""Sums on a device are those of numpy; here torch's own CPU is the device."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from kvd.geometry.model import EngineGeometry, Region, WorkerGeometry
from kvd.topology.checksums.sums import Classes, InMemory, TokenSpan, layer_sums
from kvd.vllm.memory.page_sums import OnDevice, summer_of
from tests.kvd.topology.checksums.test_comparison import loads
from tests.support import oracle

torch = pytest.importorskip("torch")


@pytest.mark.timeout(300)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(loads())
def test_torch_adds_up_as_numpy_does(
    case: tuple[EngineGeometry, EngineGeometry, int, oracle.Request],
) -> None:
    local, _, rank, request = case
    worker = local.workers[rank]
    memory = oracle.memory(worker)
    oracle.fill(memory, request.local)
    device = OnDevice(worker.regions, [torch.from_numpy(region) for region in memory.regions])
    for group in worker.groups:
        blocks = request.local[group.index]
        firsts = oracle.firsts(group, blocks)
        span = TokenSpan(0, 1) if group.kind == "mamba" else TokenSpan(request.tokens // 3, request.tokens)
        for layer in group.layers:
            theirs, ours = (
                layer_sums(layer, summer, firsts=firsts, ids=blocks.ids, span=span, classes=Classes(1, 3))
                for summer in (InMemory(memory.regions), device)
            )
            assert (theirs == ours).all(), f"{layer.name}"


def test_host_memory_is_read_where_it_stands() -> None:
    buffer = np.arange(64, dtype=np.uint8)
    worker = WorkerGeometry(rank=None, num_blocks=1, regions=(), groups=())  # type: ignore[arg-type]
    address = int(buffer.ctypes.data)
    there = WorkerGeometry(worker.rank, 1, (Region(address, 64, "cpu"),), ())
    summer = summer_of(there)
    assert isinstance(summer, InMemory)
    buffer[3] = 200
    assert summer.regions[0].tolist() == buffer.tolist()
