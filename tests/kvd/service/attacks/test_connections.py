"""Connections that are too many, that say nothing, or say more than they read: none of it is felt by others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvd.wire.frame import decode, encode
from kvd.wire.handshake import GetPeer
from kvd.wire.identity import LeaseKey
from kvd.wire.lease import LeaseOpened, LeaseRelease
from kvd.wire.query import GetStatus, KvdStatus
from kvd.wire.registration import OpenLease
from kvd.wire.reply import Ok
from kvd.zmtp.frames import LONG, MORE, buffers
from tests.support.attacked import assert_unfelled, attack, attacked, attacking
from tests.support.daemons import Daemon, daemons, facts, scheduler, session, wait_for, worker
from tests.support.raw_zmtp import connected, frame, spoken

SECONDS = 1.0
FEW = 256
"""Open files that a kvd may have which is to run out of them."""


def places(kvd: Daemon) -> tuple[Path | int, ...]:
    return kvd.directory / "kvd.sock", kvd.directory / "events.sock", kvd.port


def serves(kvd: Daemon) -> dict[str, int]:
    """Its counters, asked for on a new connection, at once."""
    return kvd.status(3.0).counters


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    """One kvd for attacks that need none of their own: it has to outlive each of them."""
    with daemons() as (kvd,):
        yield kvd


# --- connections ---


def stay_silent(wheres: tuple[Path | int, ...], said: bytes) -> None:
    """As many connections as the system allows, on which next to nothing is said."""
    held = []
    ends = time.monotonic() + 30
    while time.monotonic() < ends:
        for where in wheres:
            try:
                held.append(connected(where))
                held[-1].send(said)
            except OSError:
                time.sleep(0.001)
        if len(held) > 3000:
            held.clear()


@pytest.mark.parametrize("said", [b"", b"\xff\0\0\0\0\0\0\0\1"], ids=["nothing", "9 bytes"])
def test_silent_connections_up_to_the_limit_of_open_files(said: bytes) -> None:
    with daemons() as (kvd,):
        kvd.kill()
        kvd.by = ("prlimit", f"--nofile={FEW}")
        kvd.start()
        with attacked(kvd) as watch:
            attack(stay_silent, places(kvd), said, seconds=SECONDS)
        assert_unfelled(watch.verdict())
        counters = serves(kvd)
        assert "connections.local.accept_failed" not in counters
        assert "connections.peer.accept_failed" not in counters
        assert counters["connections.peer.handshake_failed"] > 20


def come_and_go(where: Path | int) -> None:
    while True:
        with contextlib.suppress(OSError):
            connected(where).close()


@pytest.mark.parametrize("where", ["local", "peer"])
def test_connecting_and_closing_as_fast_as_possible(shared: Daemon, where: str) -> None:
    failed = f"connections.{where}.handshake_failed"
    before = serves(shared).get(failed, 0)
    place = shared.port if where == "peer" else shared.directory / "kvd.sock"
    with attacked(shared) as watch, attacking(come_and_go, place) as attacker:
        attacker.wait(SECONDS)
        wait_for(lambda: shared.status(20.0).counters.get(failed, 0) > before + 500, 30)
    assert_unfelled(watch.verdict())


def test_a_silent_connection_ends_after_three_seconds() -> None:
    with daemons() as (kvd,), connected(kvd.directory / "kvd.sock") as silent:
        began = time.monotonic()
        while silent.recv(64):
            pass
        assert 2.5 < time.monotonic() - began < 4.5


# --- what is sent ---


def never_end_a_message(where: Path | int) -> None:
    part = buffers(bytes(1 << 20), b"")[0] + bytes(1 << 20)
    while True:
        with contextlib.suppress(OSError):
            sender = spoken(where)
            while True:
                sender.sendall(part)


def a_million_parts(where: Path | int) -> None:
    while True:
        with contextlib.suppress(OSError):
            spoken(where).sendall(bytes((MORE, 0)) * 1_000_000 + bytes(2))


def half_of_large_frames(where: Path | int) -> None:
    """Many connections, each with a frame of 16 MiB that has begun and does not end."""
    begun = [spoken(where) for _ in range(50)]
    for sender in begun:
        sender.setblocking(False)
        sender.send(bytes((LONG,)) + (16 << 20).to_bytes(8, "big"))
    while True:
        for sender in begun:
            with contextlib.suppress(OSError):
                sender.send(bytes(1 << 20))


@pytest.mark.parametrize("talk", [never_end_a_message, a_million_parts, half_of_large_frames])
def test_messages_that_are_never_whole(shared: Daemon, talk: object) -> None:
    with attacked(shared) as watch:
        attack(talk, shared.directory / "kvd.sock", seconds=SECONDS)  # type: ignore[arg-type]
    assert_unfelled(watch.verdict())
    serves(shared)


def leave_with_much_queued(directory: Path) -> None:
    """Tens of thousands of questions and subscriptions, whose sender is gone before they are answered."""
    while True:
        with (
            zmq.Context() as context,
            context.socket(zmq.DEALER) as asking,
            context.socket(zmq.SUB) as reading,
        ):
            for made in (asking, reading):
                made.linger = 0
                made.sndhwm = made.rcvhwm = 0
                made.setsockopt(zmq.HEARTBEAT_IVL, 10)
            reading.connect(f"ipc://{directory}/events.sock")
            for number in range(20_000):
                reading.subscribe(f"{number}")
            asking.connect(f"ipc://{directory}/kvd.sock")
            question = encode(GetStatus(), 1)
            for _ in range(20_000):
                asking.send(question)
            time.sleep(0.1)


def test_clients_that_leave_with_much_queued(shared: Daemon) -> None:
    with attacked(shared) as watch:
        attack(leave_with_much_queued, shared.directory, seconds=SECONDS)
    assert_unfelled(watch.verdict())
    serves(shared)


def flood(where: Path | int) -> None:
    """Eight connections that send questions as fast as they can, and read all answers."""
    question = encode(GetStatus(), 1)
    with zmq.Context() as context:
        made = []
        for _ in range(8):
            made.append(context.socket(zmq.DEALER))
            made[-1].linger = 0
            made[-1].connect(f"ipc://{where}" if isinstance(where, Path) else f"tcp://127.0.0.1:{where}")
        while True:
            for sender in made:
                with contextlib.suppress(zmq.Again):
                    for _ in range(50):
                        sender.send(question, zmq.NOBLOCK)
                with contextlib.suppress(zmq.Again):
                    while True:
                        sender.recv(zmq.NOBLOCK)


def test_a_flood_of_questions_leaves_others_their_turns(shared: Daemon) -> None:
    with attacked(shared) as watch:
        attack(flood, shared.directory / "kvd.sock", seconds=SECONDS)
    assert_unfelled(watch.verdict())


# --- what is not read ---


def ask_and_never_read(where: Path) -> None:
    """Questions whose answers are much larger than they are, on many connections that nobody reads."""
    many = b"".join(buffers(encode(GetStatus(), 1))) * 1000
    made = [spoken(where) for _ in range(200)]
    for sender in made:
        sender.setblocking(False)
    while True:
        for sender in made:
            with contextlib.suppress(OSError):
                sender.send(many)
        time.sleep(0.01)


def test_answers_that_nobody_reads(shared: Daemon) -> None:
    with attacked(shared) as watch:
        attack(ask_and_never_read, shared.directory / "kvd.sock", seconds=SECONDS)
    assert_unfelled(watch.verdict())
    serves(shared)


# --- routes ---


def test_a_routing_id_of_the_clients_choice_means_nothing() -> None:
    with daemons() as (kvd,), contextlib.ExitStack() as stack:
        where = kvd.directory / "kvd.sock"
        ids = [b"", b"same", b"same", *(bytes(1) + number.to_bytes(4, "big") for number in range(200))]
        made = [stack.enter_context(spoken(where, identity=identity)) for identity in ids]
        for number, sender in enumerate(made, 1):
            sender.sendall(b"".join(buffers(encode(GetStatus(), number))))
        for number, sender in enumerate(made, 1):
            answer, correlation = decode(frame(sender))
            assert isinstance(answer, KvdStatus)
            assert correlation == number
        serves(kvd)


# --- requests that wait ---


def ask_about_half_an_engine(directory: Path) -> None:
    """More questions than may wait, about an engine of which a worker is missing."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        sender.linger, sender.sndhwm, sender.rcvhwm = 0, 0, 0
        sender.connect(f"ipc://{directory}/kvd.sock")
        sender.send(encode(worker(facts("half", tp=2)), 1))
        sender.recv()
        for number in range(2, 4202):
            sender.send(encode(GetPeer(local_engine="half", engine_id="other"), number))
        while True:
            sender.recv()


def test_one_clients_questions_leave_room_for_the_claims_of_others() -> None:
    with daemons() as (kvd,), session(kvd, scheduler(facts("p"))) as prefiller:
        with attacked(kvd) as watch, attacking(ask_about_half_an_engine, kvd.directory):
            wait_for(lambda: serves(kvd).get("received.get_peer", 0) >= 4200, 20)
            for number in range(40):
                opened = LeaseOpened(engine_id="p", leases=(OpenLease(f"r{number}", 5.0, 3),))
                assert prefiller.call(opened, 5).result(5) == Ok()
                key = LeaseKey(engine_id="p", request_id=f"r{number}")
                assert prefiller.call(LeaseRelease(key=key, reader="one"), 5).result(5) == Ok()
        assert_unfelled(watch.verdict())
