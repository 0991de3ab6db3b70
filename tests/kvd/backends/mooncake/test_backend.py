"""Mooncake between real processes: every byte, every way to give up in both directions, and a clean stdout."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvd.backends.contract import State, WindowBackend
from kvd.backends.envelope import Envelope, pack, unpack
from kvd.backends.errors import (
    BackendError,
    PeerMetadataError,
    RegistrationError,
    TransferRefused,
    WorkerUnreachable,
)
from kvd.backends.mooncake.backend import MooncakeBackend, open_backend
from kvd.backends.mooncake.library import load
from kvd.backends.mooncake.target import EngineTarget, parse_target
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from tests.support.backend_give_up import wait
from tests.support.halting import halt

pytest.importorskip("mooncake", exc_type=ImportError)

SUPPORT = Path(__file__).parents[3] / "support"
ROOT = Path(__file__).parents[4]
BYTES = 32 << 20
LOCAL = {"host": "127.0.0.1"}
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def environ() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MC_", "GLOG_"))}
    return kept | {"VLLM_HOST_IP": "127.0.0.1", "PYTHONPATH": f"{ROOT}:{ROOT / 'daemon'}"}


def run(script: str, *arguments: str) -> dict[str, Any]:
    """Run a support script; it must end with 0 and print one line and nothing else."""
    done = subprocess.run(
        [sys.executable, str(SUPPORT / script), "mooncake", *arguments],
        env=environ(),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout
    found: dict[str, Any] = json.loads(lines[0])
    return found


def rows(*triples: tuple[int, int, int]) -> Descriptors:
    return Descriptors(*np.array(triples, np.int64).reshape(-1, 3).T)


@pytest.fixture
def backends() -> Iterator[Callable[..., MooncakeBackend]]:
    """Makes backends over memory that outlives them."""
    with ExitStack() as stack:

        def make(memory: Bytes, options: Mapping[str, Any] = LOCAL) -> MooncakeBackend:
            backend = open_backend("worker", options=options)
            stack.callback(lambda _: backend.close(), memory)
            backend.register([Region(memory.ctypes.data, memory.nbytes)])
            return backend

        yield make


@pytest.mark.slow
def test_two_processes() -> None:
    found = run("backend_reader.py")
    assert found["whole"] == ["done", True]
    assert found["fragments"] == ["done", True]
    assert found["write"] == "done"
    assert found["written"] is True
    for side, whose in (("unregistered_remote", "remote descriptor 0"), ("unregistered_local", "local")):
        kind, message, hint = found[side]
        assert kind == "TransferRefused"
        assert whose in message
        assert "999 bytes at 0x" in message
        assert "registered" in hint
    state, reason = found["killed"]
    assert state == "failed"
    assert f"read of {BYTES} bytes in 1 descriptors, peer peer at 127.0.0.1:" in reason
    assert "the peer's process ended" in reason
    assert "stderr" in reason


@pytest.mark.slow
def test_nothing_lands_after_close_and_the_peer_survives() -> None:
    found = run("backend_give_up.py", "close", str(BYTES), "descriptors")
    assert found["before"] == "pending"
    assert found["after"] == "failed"
    assert "closed" in found["reason"]
    assert found["landed"] == 0
    assert found["peer"] is None
    assert found["other"] == "done"
    assert found["remade"] == "done"


@pytest.mark.slow
def test_everything_lands_without_close() -> None:
    """What the test above guards against does happen."""
    found = run("backend_give_up.py", "nothing", str(BYTES), "descriptors")
    assert found["before"] == "pending"
    assert found["landed"] == BYTES


@pytest.mark.slow
def test_nothing_lands_after_a_window_was_closed_and_the_writer_survives() -> None:
    found = run("backend_window.py", "close", str(8 * BYTES))
    assert found["landed"] == 0
    assert found["state"] == "failed"
    assert found["again"] == "done"
    assert found["again_landed"] == 4096
    assert found["writer"] == 0


@pytest.mark.slow
def test_the_rest_of_a_write_lands_where_the_window_stays() -> None:
    """What the test above guards against does happen."""
    found = run("backend_window.py", "nothing", str(8 * BYTES))
    assert found["landed"] > BYTES
    assert found["state"] == "done"


@pytest.mark.slow
def test_nothing_lands_of_a_writer_that_was_killed() -> None:
    assert run("backend_window.py", "kill", str(8 * BYTES))["landed"] == 0


@contextmanager
def peer_process(size: int) -> Iterator[tuple[int, bytes, int]]:
    """A process to read from: its pid, its metadata and the address of its memory."""
    peer = subprocess.Popen(
        [sys.executable, str(SUPPORT / "backend_peer.py"), "mooncake", str(size)],
        env=environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert peer.stdout is not None
        hello = json.loads(peer.stdout.readline())
        yield peer.pid, bytes.fromhex(hello["metadata"]), hello["address"]
    finally:
        peer.kill()
        peer.communicate()


@pytest.mark.slow
def test_a_stopped_peer_is_not_waited_for(backends: Callable[..., MooncakeBackend]) -> None:
    lane = backends(np.zeros(4096, np.uint8), LOCAL | {"connect_timeout_s": 0.3}).lane("p")
    with peer_process(4096) as (pid, metadata, _):
        halt(pid)
        before = time.monotonic()
        with pytest.raises(WorkerUnreachable, match=r"did not answer within 0\.3 s"):
            lane.add("p", metadata)
        lane.close()
        assert time.monotonic() - before < 30  # Mooncake itself waits 61 s
    opening = [t for t in threading.enumerate() if t.name.startswith("open-")]
    for thread in opening:  # the peer's end lets it go, and it destroys its engine
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.slow
def test_mooncake_fails_what_makes_no_progress(
    backends: Callable[..., MooncakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC"):
        monkeypatch.setenv(name, "")  # so that what the option sets is taken back
    memory: Bytes = np.zeros(4096, np.uint8)
    lane = backends(memory, LOCAL | {"progress_timeout_s": 1}).lane("p")
    with peer_process(4096) as (pid, metadata, address):
        lane.add("p", metadata)
        halt(pid)
        transfer = lane.submit("p", rows((memory.ctypes.data, address, 4096)))
        assert lane.poll(transfer) is State.PENDING
        assert wait(lane, transfer, 25) is State.FAILED
        assert "still takes connections: the peer refused the address, made no progress" in transfer.reason


def test_many_pieces_of_many_transfers(backends: Callable[..., MooncakeBackend]) -> None:
    source: Bytes = np.random.default_rng(5).integers(1, 256, 1 << 20).astype(np.uint8)
    target: Bytes = np.zeros(1 << 20, np.uint8)
    backend = backends(target, LOCAL | {"in_flight": 3, "piece_bytes": 4096})
    lane = backend.lane("p")
    lane.add("p", backends(source).metadata())
    step = 1 << 16
    transfers = [
        lane.submit("p", rows(*((target.ctypes.data + at, source.ctypes.data + at, step - 1),)))
        for at in range(0, 1 << 20, step)
    ]
    assert [wait(lane, transfer, 20) for transfer in transfers] == [State.DONE] * len(transfers)
    assert all(transfer.detail["pieces"] == 16 for transfer in transfers)
    image = source.copy()
    image[step - 1 :: step] = 0
    assert (target == image).all()


def test_a_window_takes_what_its_peer_writes_and_no_more_once_closed(
    backends: Callable[..., MooncakeBackend],
) -> None:
    mine: Bytes = np.zeros(4096, np.uint8)
    theirs: Bytes = np.full(4096, 9, np.uint8)
    backend, writer = backends(mine), backends(theirs)
    assert isinstance(backend, WindowBackend)
    assert backend.traits.lands
    window, other = backend.window("a"), backend.window("b")
    lane = writer.lane("p")
    lane.add("a", window.metadata())
    lane.add("b", other.metadata())
    into = rows((theirs.ctypes.data, mine.ctypes.data, 100))
    assert wait(lane, lane.submit("a", into, "write"), 20) is State.DONE
    assert mine.sum() == 900
    window.close()
    window.close()
    for call in (window.metadata, window.progress):
        with pytest.raises(TransferRefused, match="closed"):
            call()
    failed = lane.submit("a", into, "write")
    assert wait(lane, failed, 20) is State.FAILED
    assert "nothing listens" in failed.reason
    beyond = rows((theirs.ctypes.data, mine.ctypes.data + 100, 100))
    assert wait(lane, lane.submit("b", beyond, "write"), 20) is State.DONE
    assert mine.sum() == 1800


def test_metadata_of_a_process_that_is_no_more_is_refused(backends: Callable[..., MooncakeBackend]) -> None:
    """A later engine may have the same port: it has another mark."""
    backend, peer = backends(np.zeros(4096, np.uint8)), backends(np.zeros(4096, np.uint8))
    now = unpack(peer.metadata(), backend="mooncake")
    target = parse_target(now.blob, "tcp")
    older = EngineTarget(target.session, "tcp", bytes(16).hex(), target.mark_address)
    metadata = pack(Envelope(now.backend, now.version, now.agent, now.regions, msgspec.json.encode(older)))
    lane = backend.lane("p")
    with pytest.raises(PeerMetadataError, match=f"{target.mark}, not {bytes(16).hex()}"):
        lane.add("p", metadata)
    peer.close()
    with pytest.raises(WorkerUnreachable, match="nothing listens"):
        lane.add("p", pack(Envelope(now.backend, now.version, now.agent, now.regions, now.blob)))


def test_another_protocol_is_refused_with_both(backends: Callable[..., MooncakeBackend]) -> None:
    backend = backends(np.zeros(4096, np.uint8))
    blob = msgspec.json.encode(EngineTarget("127.0.0.1:1", "rdma", bytes(16).hex(), 4096))
    with pytest.raises(PeerMetadataError, match="protocol is rdma at the peer and tcp here"):
        backend.lane("p").add("p", pack(Envelope("mooncake", load().version, "a", (), blob)))


def test_a_transfer_of_another_lane_and_one_whose_peer_was_replaced_have_failed(
    backends: Callable[..., MooncakeBackend],
) -> None:
    mine, theirs = np.zeros(BYTES, np.uint8), np.ones(BYTES, np.uint8)
    backend, peer, successor = backends(mine), backends(theirs), backends(theirs)
    lane, other = backend.lane("a"), backend.lane("b")
    lane.add("p", peer.metadata())
    transfer = lane.submit("p", rows((mine.ctypes.data, theirs.ctypes.data, BYTES)))
    assert transfer.state is State.PENDING
    lane.add("p", successor.metadata())
    assert lane.poll(transfer) is State.FAILED
    assert "added anew" in transfer.reason
    again = lane.submit("p", rows((mine.ctypes.data, theirs.ctypes.data, BYTES)))
    assert other.poll(again) is State.FAILED


def test_close_says_so_when_the_engine_lives_on(backends: Callable[..., MooncakeBackend]) -> None:
    backend = backends(np.zeros(4096, np.uint8))
    lane = backend.lane("held")
    lane.add("p", backend.metadata())
    held = lane._peers["p"].engine._engine
    with pytest.raises(BackendError, match="still referred to"):
        lane.close()
    with pytest.raises(BackendError, match="still referred to"):
        lane.close()
    del held
    lane.close()


def test_closing_leaves_no_thread_and_no_port(backends: Callable[..., MooncakeBackend]) -> None:
    def count() -> tuple[int, int]:
        return tuple(len(list(Path("/proc/self", of).iterdir())) for of in ("task", "fd"))  # type: ignore[return-value]

    def cycle() -> None:
        backend = backends(np.zeros(4096, np.uint8))
        lane = backend.lane("p")
        lane.add("p", backend.metadata())
        backend.window("l")
        backend.close()
        backend.close()

    cycle()  # Mooncake keeps some threads of its own for the process's life
    before = count()
    for _ in range(3):
        cycle()
    assert count() <= before


def test_a_silent_connection_does_not_hold_up_destruction(backends: Callable[..., MooncakeBackend]) -> None:
    """Mooncake's listener waits a minute for it to speak, and its destructor for the listener, with the GIL held."""
    backend = backends(np.zeros(4096, np.uint8))
    target = parse_target(unpack(backend.metadata(), backend="mooncake").blob, "tcp")
    with ExitStack() as stack:
        for _ in range(3):
            port = int(target.session.rpartition(":")[2])
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
        before = time.monotonic()
        backend.close()
        assert time.monotonic() - before < 30


def test_device_memory_needs_a_build_for_it() -> None:
    backend = open_backend("gpu", options=LOCAL)
    if not load().cuda:
        with pytest.raises(RegistrationError, match="has no CUDA"):
            backend.register([Region(1 << 20, 4096, "cuda:0")])
    with pytest.raises(RegistrationError, match="kinds are cpu, cuda"):
        backend.register([Region(1 << 20, 4096, "tpu:0")])
    backend.close()
