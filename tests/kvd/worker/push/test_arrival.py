"""What a push is expected to consist of: exactly what the prefilling workers send, over random pairs of engines."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from kvd.geometry.model import EngineGeometry
from kvd.geometry.rank import Rank
from kvd.topology.blocks import BlockList
from kvd.topology.plan import plan_worker
from kvd.topology.push import compile_chunk, plan_push
from kvd.wire.identity import Endpoint
from kvd.wire.push import PushKey
from kvd.worker.load import Load
from kvd.worker.orders import block_lists
from kvd.worker.push.arrival import Arrival, Part, expect
from tests.kvd.topology.test_oracle import THOROUGH, cases
from tests.support import oracle
from tests.support.rigs.push import PushRig, pushed

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


def test_a_new_attempt_begins_from_nothing() -> None:
    rig = PushRig()
    plan = plan_worker(
        rig.decoder.geometry, rig.decoder.topology.local.workers, [w.geometry for w in rig.p.workers]
    )
    order = pushed((2,), tokens=4)
    key = PushKey(transfer_id="x", prefiller="p", prefiller_endpoint=Endpoint(), decoder="d", rank=Rank(0))
    arrival = Arrival(
        Load(order, 0.0, 30.0), plan, expect(plan, block_lists(order.groups), order.tokens), key
    )
    arrival.reannounce(1.0)
    arrival.sent(3, 1.0)
    arrival.mark_received(Rank(0), ("l0",), 2.0)
    arrival.quiesced.add(Rank(0))
    arrival.reannounce(5.0)
    assert (arrival.left, arrival.quiesced) == (set(arrival.expected.parts), set())
    assert (arrival.key.attempt, arrival.announced, arrival.asked, arrival.first) == (4, 1.0, 0.0, 0.0)
    rig.close()
