"""Direct reads between two real processes: every byte, every end of the peer, and every reason not to read."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvd.backends.contract import Lane, State, Transfer, holdings_of
from kvd.backends.direct import backend as direct
from kvd.backends.direct.backend import DirectBackend, DirectOptions
from kvd.backends.direct.card import Card
from kvd.backends.direct.host import copy as direct_copy
from kvd.backends.direct.host import lane as direct_lane
from kvd.backends.direct.host.lane import DirectLane
from kvd.backends.direct.memfd import Backing, MemfdView, backing, memfd
from kvd.backends.envelope import pack, unpack
from kvd.backends.errors import BackendError, BackendUnavailable, PeerMetadataError, WorkerUnreachable
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from tests.support.backend_peer import pattern
from tests.support.direct_started import Worker, started
from tests.support.raising import raises

SIZE = 4 << 20
NOBODY = 65534
NO_MEMFD = Backing(0, 0, 1)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")


Start = Callable[..., Worker]


def card_of(peer: Worker, **changes: Any) -> bytes:
    """Its metadata with other words on its card; those of its process by their own names."""
    envelope = unpack(peer.metadata, backend="direct")
    card = msgspec.json.decode(envelope.blob, type=Card)
    ours = {name: value for name, value in changes.items() if name in Card.__struct_fields__}
    process = msgspec.structs.replace(
        card.process, **{name: value for name, value in changes.items() if name not in ours}
    )
    blob = msgspec.json.encode(msgspec.structs.replace(card, process=process, **ours))
    return pack(replace(envelope, blob=blob))


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:
        yield lambda **wanted: stack.enter_context(started(SIZE, **wanted))


@dataclass
class Reader:
    buffer: Any = field(default_factory=lambda: np.zeros(SIZE, np.uint8))
    backend: DirectBackend = field(
        default_factory=lambda: DirectBackend("reader", DirectOptions(copy_threads=1))
    )

    def lane(self, peer: Worker) -> DirectLane:
        lane = self.backend.lane("one")
        assert isinstance(lane, DirectLane)
        lane.add("p", peer.metadata)
        return lane

    def rows(self, peer: Worker, *triples: tuple[int, int, int]) -> Descriptors:
        local, remote, length = np.array(triples, np.int64).reshape(-1, 3).T
        return Descriptors(local + self.buffer.ctypes.data, remote + peer.address, length)


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    made.backend.register([Region(made.buffer.ctypes.data, SIZE)])
    yield made
    made.backend.close()


@pytest.fixture
def in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call copies one small piece, so that a transfer is under way for as long as a test likes."""
    monkeypatch.setattr(direct_lane, "SLICE_S", 0.0)
    monkeypatch.setattr(direct_copy, "CALL_BYTES", 64 << 10)


def finish(lane: Lane, transfer: Transfer) -> State:
    while lane.poll(transfer) is State.PENDING:
        pass
    return transfer.state


both_ways = pytest.mark.parametrize("memfd", [False, True], ids=["in-place", "mapped"])


@both_ways
def test_reads_scattered_rows_of_every_length(
    start: Start, reader: Reader, monkeypatch: pytest.MonkeyPatch, memfd: bool
) -> None:
    monkeypatch.setattr(direct_copy, "CALL_BYTES", 5000)  # calls end in the middle of rows
    monkeypatch.setattr(direct_copy, "IOV_MAX", 7)
    peer, dice = start(memfd=memfd), np.random.default_rng(5)
    starts = np.arange(0, SIZE - 40000, 40000) + dice.integers(0, 20000, len(range(0, SIZE - 40000, 40000)))
    lengths = dice.integers(0, 20000, len(starts))
    lengths[::3] %= 50
    sources = dice.permutation(starts)
    lane, expected, image = reader.lane(peer), pattern(SIZE), np.zeros(SIZE, np.uint8)
    triples = list(zip(starts.tolist(), sources.tolist(), lengths.tolist(), strict=True))
    for local, remote, length in triples:
        image[local : local + length] = expected[remote : remote + length]
    transfer = lane.submit("p", reader.rows(peer, *triples))
    assert finish(lane, transfer) is State.DONE
    assert transfer.bytes == lengths.sum()
    assert (reader.buffer == image).all()
    assert lane._peers["p"].source.mapped is memfd
    (held,) = holdings_of(lane)
    assert (held.peer, held.nbytes > 0, held.ended) == ("p", True, False)
    assert held.mapped == (held.nbytes if memfd else 0)


@both_ways
@pytest.mark.usefixtures("in_steps")
def test_all_of_a_read_is_there_for_the_stream_behind_it(start: Start, reader: Reader, memfd: bool) -> None:
    peer = start(memfd=memfd)
    lane = reader.lane(peer)
    transfer = lane.submit("p", reader.rows(peer, (0, 0, SIZE)))
    assert transfer.state.value == "pending"
    lane.precede(transfer, 0)
    assert transfer.state is State.DONE
    assert (reader.buffer == pattern(SIZE)).all()


@pytest.mark.usefixtures("in_steps")
def test_no_stream_waits_for_a_source_that_was_killed(start: Start, reader: Reader) -> None:
    peer = start()
    lane = reader.lane(peer)
    transfer = lane.submit("p", reader.rows(peer, (0, 0, SIZE)))
    peer.kill()
    lane.precede(transfer, 0)
    assert transfer.state is State.FAILED


@both_ways
def test_a_stopped_peer_is_read_all_the_same(start: Start, reader: Reader, memfd: bool) -> None:
    peer = start(memfd=memfd)
    lane = reader.lane(peer)
    os.kill(peer.process.pid, signal.SIGSTOP)
    assert finish(lane, lane.submit("p", reader.rows(peer, (0, 0, SIZE)))) is State.DONE
    assert (reader.buffer == pattern(SIZE)).all()


@pytest.mark.usefixtures("in_steps")
def test_a_source_that_is_killed_under_a_read_fails_it(start: Start, reader: Reader) -> None:
    peer = start()
    lane = reader.lane(peer)
    transfer = lane.submit("p", reader.rows(peer, (0, 0, SIZE)))
    assert lane.poll(transfer) is State.PENDING
    peer.kill()
    assert finish(lane, transfer) is State.FAILED
    assert f"process {peer.process.pid} of the peer is gone" in transfer.reason


@pytest.mark.usefixtures("in_steps")
def test_a_mapped_read_ends_well_though_its_source_is_killed(start: Start, reader: Reader) -> None:
    peer = start(memfd=True)
    lane = reader.lane(peer)
    transfer = lane.submit("p", reader.rows(peer, (0, 0, SIZE)))
    assert lane.poll(transfer) is State.PENDING
    peer.kill()
    assert finish(lane, transfer) is State.DONE
    assert (reader.buffer == pattern(SIZE)).all()


@both_ways
def test_nothing_new_is_read_from_a_dead_source(start: Start, reader: Reader, memfd: bool) -> None:
    peer = start(memfd=memfd)
    lane = reader.lane(peer)
    peer.kill()
    with raises("KVD-BACKEND-UNREACHABLE", match="gone"):
        lane.submit("p", reader.rows(peer, (0, 0, 10)))
    with raises("KVD-BACKEND-UNREACHABLE", match=f"process {peer.process.pid} of the peer is gone"):
        reader.lane(peer)
    assert not reader.buffer.any()


@both_ways
@pytest.mark.usefixtures("in_steps")
def test_a_home_that_is_closed_turns_readers_away(start: Start, reader: Reader, memfd: bool) -> None:
    peer = start(memfd=memfd)
    lane = reader.lane(peer)
    transfer = lane.submit("p", reader.rows(peer, (0, 0, SIZE)))
    peer.order("close")
    assert finish(lane, transfer) is State.FAILED
    assert f"backend in process {peer.process.pid}" in transfer.reason
    with pytest.raises(WorkerUnreachable, match="the backend in process"):
        reader.lane(peer)


def test_memory_that_went_away_fails_the_read_and_names_the_address(start: Start, reader: Reader) -> None:
    peer = start()
    lane = reader.lane(peer)
    peer.order("unmap")
    transfer = lane.submit("p", reader.rows(peer, (0, SIZE // 2 - 5000, 10000)))
    assert finish(lane, transfer) is State.FAILED
    assert f"{peer.address + SIZE // 2:#x}" in transfer.reason
    assert "Bad address" in transfer.reason
    assert finish(lane, lane.submit("p", reader.rows(peer, (0, 0, 10000)))) is State.DONE


@both_ways
@pytest.mark.usefixtures("in_steps")
def test_nothing_lands_after_close(start: Start, reader: Reader, memfd: bool) -> None:
    peer = start(memfd=memfd)
    lane = reader.lane(peer)
    transfer = lane.submit("p", reader.rows(peer, (0, 0, SIZE)))
    assert lane.poll(transfer) is State.PENDING
    lane.close()
    assert transfer.state is State.FAILED
    assert "closed" in transfer.reason
    reader.buffer[:] = 0
    assert lane.poll(transfer) is State.FAILED
    assert not reader.buffer.any()


def test_memory_that_its_owner_may_shrink_is_not_mapped(start: Start, reader: Reader) -> None:
    """Touching a mapping beyond the end of its file would end this process with SIGBUS."""
    peer = start(memfd="unsealed")
    lane = reader.lane(peer)
    assert not lane._peers["p"].source.mapped
    assert finish(lane, lane.submit("p", reader.rows(peer, (0, 0, SIZE)))) is State.DONE
    assert (reader.buffer == pattern(SIZE)).all()


@pytest.mark.parametrize(("offset", "length"), [(0, SIZE + 1), (mmap.PAGESIZE, SIZE), (-mmap.PAGESIZE, SIZE)])
def test_more_than_there_is_of_a_memfd_is_not_mapped(offset: int, length: int) -> None:
    """The numbers are the peer's: what is not an OSError would end more than the way to it."""
    memory = memfd("test", SIZE)
    known = backing(Region(np.frombuffer(memory, np.uint8).ctypes.data, SIZE))
    assert known is not None
    with pytest.raises(OSError, match=f"has {SIZE} bytes, wanted are {length} bytes at {offset}"):
        MemfdView(os.getpid(), msgspec.structs.replace(known, offset=offset), length)
    os.close(known.fd)


def test_others_may_map_a_memfd_but_neither_write_nor_resize_it() -> None:
    memory = memfd("test", SIZE)
    memory[:3] = b"abc"
    address = np.frombuffer(memory, np.uint8).ctypes.data
    known = backing(Region(address, SIZE))
    assert known is not None
    other = os.open(f"/proc/{os.getpid()}/fd/{known.fd}", os.O_RDWR)
    assert mmap.mmap(other, SIZE, prot=mmap.PROT_READ)[:3] == b"abc"
    for forbidden in (
        lambda: mmap.mmap(other, SIZE),
        lambda: os.pwrite(other, b"x", 0),
        lambda: os.ftruncate(other, SIZE // 2),
    ):
        with pytest.raises(PermissionError):
            forbidden()
    memory[:3] = b"xyz"  # its owner still may
    os.close(other)
    os.close(known.fd)


def test_a_system_without_the_call_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: object) -> bytes:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(direct, "read_bytes", refusing)
    with pytest.raises(BackendUnavailable, match="Function not implemented") as refused:
        direct.open_backend("x", options={})
    assert "seccomp" in refused.value.hint


@both_ways
def test_another_process_under_the_same_number_is_not_read(start: Start, reader: Reader, memfd: bool) -> None:
    peer = start(memfd=memfd)
    for metadata, says in (
        (card_of(peer, started=12345), r"not the peer any more: it started at tick \d+, the peer at 12345"),
        (card_of(peer, secret=b"x" * 32), "another stands in its place"),
        (card_of(peer, cookie=4096, cookie_memory=NO_MEMFD), "cookie cannot be read"),
        (card_of(peer, boot="of-another-host"), "boot id of-another-host there and"),
        (card_of(peer, pid_namespace=7), "pid namespace 7 and this worker in"),
    ):
        with pytest.raises(WorkerUnreachable, match=says):
            reader.backend.lane("x").add("p", metadata)
    assert not reader.buffer.any()


def test_a_card_that_is_none_is_refused(start: Start, reader: Reader) -> None:
    peer = start(memfd=True)
    envelope = unpack(peer.metadata, backend="direct")
    with pytest.raises(PeerMetadataError, match="cannot be read"):
        reader.backend.lane("x").add("p", pack(replace(envelope, blob=b"{}")))
    twice = card_of(peer, memory=(NO_MEMFD, NO_MEMFD))
    with pytest.raises(PeerMetadataError, match="2 memfds for 1 regions"):
        reader.backend.lane("x").add("p", twice)


@pytest.mark.parametrize(("options", "says"), [({"memfd": "yes"}, "'yes'"), ({"colour": True}, "colour")])
def test_options_are_read_strictly(options: dict[str, Any], says: str) -> None:
    with pytest.raises(BackendError, match=says):
        direct.open_backend("x", options=options)


@as_root
@both_ways
@pytest.mark.parametrize(
    ("owner", "dumpable", "says"),
    [
        (None, True, f"the peer runs as uid 0 and this worker as uid {NOBODY} without CAP_SYS_PTRACE"),
        (NOBODY, False, "the peer is not dumpable"),
        (NOBODY, True, ""),
    ],
    ids=["other-user", "not-dumpable", "same-user"],
)
def test_who_may_not_read_is_told_why_and_what_helps(
    start: Start, memfd: bool, owner: int | None, dumpable: bool, says: str
) -> None:
    peer = start(memfd=memfd, uid=owner, dumpable=dumpable)
    command = [sys.executable, "-m", "tests.support.direct_reader", str(NOBODY), peer.metadata.hex()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    told = json.loads(done.stdout)
    if says:
        assert says in told[0]
        assert "set backend auto" in told[1]
    else:
        assert told == []
