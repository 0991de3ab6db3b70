"""Streams of a made-up device behind the copies of a lane: which wait, and what is said where the device refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.backends.contract import State, Transfer, orders_streams
from kvd.backends.direct.cuda.lane import CudaLane
from kvd.backends.errors import BackendError
from tests.kvd.backends.direct.cuda.test_device import SIZE, Peer, Reader
from tests.support.direct_gpu import MadeUpFlight
from tests.support.direct_started import started


class Begun:
    """Two copies that are under way on a lane."""

    def __init__(self, lane: CudaLane, reader: Reader, peer: Peer) -> None:
        self.lane = lane
        self.transfers: list[Transfer] = [lane.submit("p", reader.all(peer)) for _ in range(2)]
        self.flights: list[MadeUpFlight] = reader.copier.flights


@pytest.fixture
def begun() -> Iterator[Begun]:
    with started(SIZE, memfd=True) as worker:
        reader, peer = Reader(), Peer(worker)
        reader.copier.held = True
        lane = reader.lane(peer.metadata())
        yield Begun(lane, reader, peer)
        reader.copier.let_go()
        for flight in reader.copier.flights:
            flight.broken = ""
        lane.close()


def test_the_stream_waits_for_that_copy_and_the_host_does_not(begun: Begun) -> None:
    assert orders_streams(begun.lane)
    begun.lane.precede(begun.transfers[1], 77)
    assert [flight.before for flight in begun.flights] == [[], [77]]
    assert not begun.flights[1].waited
    assert begun.transfers[1].state is State.PENDING


def test_a_device_that_does_not_wait_is_an_error_of_the_backend(begun: Begun) -> None:
    begun.flights[0].broken = "an illegal memory access was encountered"
    with pytest.raises(
        BackendError, match="the device would not wait for the copy: an illegal memory"
    ) as refused:
        begun.lane.precede(begun.transfers[0], 77)
    assert refused.value.backend == "direct"
    assert begun.transfers[0].state is State.PENDING, "what became of it a poll says"
