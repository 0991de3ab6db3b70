"""What every backend must do, asked of each of them in one process."""

from collections.abc import Iterator

import numpy as np
import pytest

from kvd.backends.choose import open_home
from kvd.backends.contract import Home, Lane, State, Transfer
from kvd.backends.envelope import Envelope, pack
from kvd.backends.errors import BackendError, PeerMetadataError, RegistrationError, TransferRefused
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors

SIZE = 1 << 20
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Pair:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.source: Bytes = (np.arange(SIZE, dtype=np.int64) * 31 % 251 + 1).astype(np.uint8)
        self.target: Bytes = np.zeros(SIZE, np.uint8)
        self.peer = self.home(self.source)
        self.me = self.home(self.target)

    def home(self, memory: Bytes) -> Home:
        home = open_home(self.kind, "worker", {})
        home.register([Region(memory.ctypes.data, SIZE)])
        return home

    def lane(self) -> Lane:
        lane = self.me.lane("peer")
        lane.add("p", self.peer.metadata())
        return lane

    def rows(self, *triples: tuple[int, int, int]) -> Descriptors:
        local, remote, length = np.array(triples, np.int64).reshape(-1, 3).T
        return Descriptors(local + self.target.ctypes.data, remote + self.source.ctypes.data, length)


def finish(lane: Lane, transfer: Transfer) -> State:
    for _ in range(1_000_000):
        if lane.poll(transfer) is not State.PENDING:
            break
    return transfer.state


@pytest.fixture(params=["memory", "nixl"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    if request.param == "nixl":
        pytest.importorskip("nixl", exc_type=ImportError)
    made = Pair(request.param)
    yield made
    made.me.close()
    made.peer.close()


def test_reads_exactly_the_named_bytes(pair: Pair) -> None:
    lane = pair.lane()
    transfer = lane.submit("p", pair.rows((7, 4001, 1), (100, 50, 333), (70000, 8, 65537)))
    assert finish(lane, transfer) is State.DONE
    image = np.zeros(SIZE, np.uint8)
    for local, remote, length in ((7, 4001, 1), (100, 50, 333), (70000, 8, 65537)):
        image[local : local + length] = pair.source[remote : remote + length]
    assert (pair.target == image).all()
    assert transfer.bytes == 65871
    assert transfer.ended >= transfer.posted > 0


def test_writes(pair: Pair) -> None:
    pair.target[:] = 255
    lane = pair.lane()
    assert finish(lane, lane.submit("p", pair.rows((0, 10, 20)), "write")) is State.DONE
    assert (pair.source[10:30] == 255).all()
    assert (pair.source[:10] != 255).all()
    assert (pair.source[30:] != 255).all()


def test_nothing_to_copy_is_done_at_once(pair: Pair) -> None:
    lane = pair.lane()
    assert finish(lane, lane.submit("p", pair.rows())) is State.DONE


def test_adding_again_and_adding_anew(pair: Pair) -> None:
    lane = pair.lane()
    lane.add("p", pair.peer.metadata())
    successor = pair.home(pair.source)
    lane.add("p", successor.metadata())
    pair.peer.close()
    assert finish(lane, lane.submit("p", pair.rows((0, 0, 100)))) is State.DONE
    assert (pair.target[:100] == pair.source[:100]).all()
    lane.close()
    successor.close()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda _: b"", "0 bytes"),
        (lambda _: b"nonsense" * 9, "nons"),
        (lambda good: good[:20], "header should have"),
        (lambda good: good[:4] + b"\x00\x09" + good[6:], "version 9 at the peer and 1 here"),
        (lambda _: pack(Envelope("mooncake", "0.3", "a", (), b"")), "'mooncake' at the peer"),
    ],
)
def test_unusable_metadata_is_refused_with_both_values(pair: Pair, spoil: object, says: str) -> None:
    lane = pair.me.lane("x")
    assert callable(spoil)
    with pytest.raises(PeerMetadataError, match=says):
        lane.add("p", spoil(pair.peer.metadata()))


def test_other_version_is_refused_with_both_values(pair: Pair) -> None:
    stranger = pack(Envelope(pair.kind, "0.9.1", "a", (Region(4096, 4096),), b""))
    with pytest.raises(PeerMetadataError, match=r"0\.9\.1 at the peer and"):
        pair.me.lane("x").add("p", stranger)


def test_refusals_leave_the_lane_usable(pair: Pair) -> None:
    lane = pair.lane()
    for rows in (pair.rows((0, SIZE - 5, 10)), pair.rows((SIZE - 5, 0, 10))):
        with pytest.raises(TransferRefused):
            lane.submit("p", rows)
    with pytest.raises(TransferRefused, match="'q'"):
        lane.submit("q", pair.rows((0, 0, 10)))
    assert not pair.target.any()
    assert finish(lane, lane.submit("p", pair.rows((0, 0, 10)))) is State.DONE


def test_a_closed_lane_takes_nothing_and_harms_no_other(pair: Pair) -> None:
    first, second = pair.lane(), pair.lane()
    first.close()
    first.close()
    with pytest.raises(TransferRefused, match="closed"):
        first.submit("p", pair.rows((0, 0, 10)))
    assert finish(second, second.submit("p", pair.rows((0, 0, 10)))) is State.DONE
    remade = pair.lane()
    assert finish(remade, remade.submit("p", pair.rows((0, 0, 10)))) is State.DONE


def test_home_wants_memory_first_and_once(pair: Pair) -> None:
    bare = open_home(pair.kind, "bare", {})
    with pytest.raises(RegistrationError):
        bare.metadata()
    with pytest.raises(RegistrationError):
        bare.lane("x")
    with pytest.raises(RegistrationError):
        bare.register([Region(4096, 0)])
    with pytest.raises(RegistrationError):
        pair.me.register([Region(4096, 4096)])
    bare.close()
    bare.close()
    with pytest.raises(BackendError, match="closed"):
        bare.lane("x")


def test_unknown_option_is_named(pair: Pair) -> None:
    with pytest.raises(BackendError, match="colour"):
        open_home(pair.kind, "x", {"colour": 1})
