"""One transfer id for two requests, on either side: neither may take the other's blocks or words for its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.vllm.cause import ABORTED
from kvd.vllm.orders import PushEnd, PushStep, StepOrders
from kvd.vllm.outgoing import Outgoing
from tests.kvd.topology import oracle
from tests.kvd.vllm.bench import eventually
from tests.kvd.vllm.send_rig import SendRig, sending, step
from tests.kvd.vllm.test_pushing import REQUEST, dense, ids

OTHER = {0: ids(20, 21, 22)}
"""The second request's blocks on the prefiller."""


@pytest.fixture
def rig() -> Iterator[SendRig]:
    with sending(dense("p"), dense("d")) as made:
        made.fill(REQUEST.remote)
        yield made


def begun_anew(rig: SendRig, second: PushStep) -> None:
    """Between two steps the first request is aborted, and a second one is scheduled at once."""
    for worker in rig.workers:
        orders = StepOrders(pushes=[second], push_ends=[PushEnd("x", "r", 0.0, ABORTED)])
        worker.half.pushing.begin(orders)


# --- the prefiller ---


def test_no_two_requests_of_one_transfer_have_the_same_epoch() -> None:
    here, seen = Outgoing(lambda: None), []
    here.begin([step({0: ids(1, 2)}, 8, 16)], [])
    seen.append(here.epoch("x"))
    here.begin([step({0: ids(7, 8)}, 8, 16, request_id="s")], [PushEnd("x", "r", 0.0, ABORTED)])
    seen.append(here.epoch("x"))
    here.begin([step({0: ids(7, 8)}, 8, 16, request_id="s", again=True)], [])
    seen.append(here.epoch("x"))
    here.begin([], [PushEnd("x", "s", 0.0, ABORTED)])
    here.begin([step({0: ids(3, 4)}, 8, 16, request_id="t")], [])
    seen.append(here.epoch("x"))
    assert len(set(seen)) == len(seen)


def test_who_reads_the_blocks_of_the_first_request_is_told_to_stop(rig: SendRig) -> None:
    rig.announce(REQUEST.local, REQUEST.tokens, landing=b"")
    rig.run(step({0: ids(1, 2)}, 32, 40))
    eventually(lambda: rig.there() == {("a", 32), ("b", 32)})
    begun_anew(rig, step(OTHER, 40, 40, request_id="s"))
    (cause,) = eventually(rig.failures)
    assert "began it anew" in cause


def test_what_was_under_way_of_the_first_request_is_sent_again_of_the_second(rig: SendRig) -> None:
    rig.announce(REQUEST.local, REQUEST.tokens)
    (worker,) = rig.workers
    worker.faults.hold |= {0}
    rig.run(step(REQUEST.remote, 32, 40))
    eventually(lambda: worker.gates.opened)
    begun_anew(rig, step(OTHER, 40, 40, request_id="s"))
    for region in worker.memory.regions:  # the first one's blocks are somebody else's now
        region[:] = 7
    rig.fill(OTHER)
    worker.faults.release(0)
    rig.stepped()
    rig.end(request_id="s")
    eventually(lambda: rig.all_sent("s"))
    assert rig.as_pulled(oracle.Request(REQUEST.local, OTHER, 40))
