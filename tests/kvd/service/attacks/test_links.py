"""Links to peers that are not there, flood, send too much, or fall silent: others notice nothing, and links heal."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

from kvd.client.errors import RefusedByDaemon
from kvd.client.session import KvdSession
from kvd.wire.frame import decode, encode
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import Endpoint
from kvd.wire.reply import Ok, Refused
from kvd.zmtp.frames import buffers
from tests.support.attacked import assert_unfelled, attacked, attacking
from tests.support.daemons import ROOT, Daemon, daemons, facts, session, wait_for, worker
from tests.support.ports import free_port
from tests.support.raw_zmtp import accepted, frame

SLOW_NAMES = """
import socket, time
real = socket.getaddrinfo
def getaddrinfo(host, *arguments, **more):
    if str(host).endswith(".dead") and not more.get("flags"):
        time.sleep(40)
    return real(host, *arguments, **more)
socket.getaddrinfo = getaddrinfo
"""
"""What a kvd runs first whose DNS does not answer for some names."""
SOON = 2.0
LONG = 20.0


def asking(where: Endpoint, engine_id: str = "p") -> GetPeer:
    return GetPeer(local_engine="d", engine_id=engine_id, endpoint=where)


def refusal(one: KvdSession, ask: GetPeer) -> Refused:
    """Why kvd refuses it."""
    error = one.call(ask, LONG).exception(LONG)
    assert isinstance(error, RefusedByDaemon)
    return error.refusal


def ask_for_many(directory: Path, endpoints: list[Endpoint]) -> None:
    """Ask for engines at all these places, again and again."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        sender.linger, sender.sndhwm, sender.rcvhwm = 0, 0, 0
        sender.connect(f"ipc://{directory}/kvd.sock")
        engine_id = f"many{os.getpid()}"
        sender.send(encode(worker(facts(engine_id)), 1))
        sender.recv()
        for number, endpoint in enumerate(endpoints, 2):
            ask = GetPeer(local_engine=engine_id, engine_id="p", endpoint=endpoint)
            sender.send(encode(ask, number))
        while True:
            sender.recv()


@contextlib.contextmanager
def slow_names(kvd: Daemon, tmp_path: Path) -> Iterator[None]:
    """A kvd that is started again, and whose names that end in .dead are looked up for 40 s."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_NAMES)
    kvd.kill()
    kvd.environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT / "daemon"), str(ROOT)])
    kvd.start()
    yield
    began = time.monotonic()
    assert kvd.stop() == 0
    assert time.monotonic() - began < 10, "the end of kvd waited for a name"


def test_names_that_dns_does_not_answer_for(tmp_path: Path) -> None:
    with daemons(2) as (near, far), slow_names(near, tmp_path), session(far, worker(facts("p"))):
        dead = [Endpoint(f"host{number}.dead", 9401) for number in range(200)]
        with attacked(near) as watch, attacking(ask_for_many, near.directory, dead):
            wait_for(lambda: near.status().counters.get("received.get_peer", 0) >= 200)
            with session(near, worker(facts("d"))) as one:
                began = time.monotonic()
                assert isinstance(one.call(asking(far.endpoint), LONG).result(LONG), PeerReady)
                assert time.monotonic() - began < SOON
                why = refusal(one, asking(Endpoint("another.dead", 9401))).message
        assert_unfelled(watch.verdict())
        assert "no connection to a kvd at another.dead:9401" in why


def test_2300_endpoints_of_one_client_leave_room_for_a_peer_that_is_there() -> None:
    with daemons(2) as (near, far), session(far, worker(facts("p"))):
        nobody = [Endpoint(f"127.1.{number // 250}.{number % 250 + 1}", 9) for number in range(2300)]
        with (
            attacked(near) as watch,
            attacking(ask_for_many, near.directory, nobody[::2]),
            attacking(ask_for_many, near.directory, nobody[1::2]),
        ):
            wait_for(lambda: near.status().counters.get("peers.gave_way", 0) >= 300, LONG)
            with session(near, worker(facts("d"))) as one:
                assert isinstance(one.call(asking(far.endpoint), LONG).result(LONG), PeerReady)
                assert len(near.status().peers) <= 1025
        assert_unfelled(watch.verdict())


def flood_whoever_dials(port: int) -> None:
    """A peer that answers nothing, and sends as fast as it can: messages that nobody asked for, and noise."""
    answers = b"".join(buffers(encode(Ok(), 1 << 40))) * 500 + b"".join(buffers(bytes(100))) * 500
    with socket.create_server(("127.0.0.1", port)) as listening:
        while True:
            with contextlib.suppress(OSError), accepted(listening) as victim:
                while True:
                    victim.sendall(answers)


def test_a_peer_that_floods_is_read_in_turn() -> None:
    port = free_port()
    with (
        daemons(2) as (near, far),
        session(far, worker(facts("p"))),
        session(near, worker(facts("d"))) as one,
    ):
        with attacked(near) as watch, attacking(flood_whoever_dials, port):
            one.call(asking(Endpoint("127.0.0.1", port)), LONG)
            wait_for(lambda: near.status().counters.get("peers.unreadable", 0) > 1000)
            assert isinstance(one.call(asking(far.endpoint), LONG).result(LONG), PeerReady)
        assert_unfelled(watch.verdict())


def test_an_answer_that_is_too_large_is_named_and_the_link_heals() -> None:
    large = worker(facts("large"))
    large = msgspec.structs.replace(
        large, card=msgspec.structs.replace(large.card, metadata=os.urandom(200_000))
    )
    with daemons(2) as (near, far):
        near.kill()
        near.environment["KVD_PEER_MAX_MESSAGE_BYTES"] = "100000"
        near.start()
        with session(far, large), session(far, worker(facts("p"))), session(near, worker(facts("d"))) as one:
            assert isinstance(one.call(asking(far.endpoint), LONG).result(LONG), PeerReady)
            began = time.monotonic()
            why = refusal(one, asking(far.endpoint, "large"))
            assert time.monotonic() - began < SOON
            assert why.code == "KVD-PEER-UNREACHABLE"
            assert "the limit is 100000 (peer.max_message_bytes)" in why.message
            with session(far, worker(facts("q"))):
                assert isinstance(one.call(asking(far.endpoint, "q"), LONG).result(LONG), PeerReady)


def test_a_peer_that_falls_silent_is_down_and_dialled_again() -> None:
    """As a host does whose power went: its connection stands, and nothing comes on it."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        daemons() as (near,),
        contextlib.ExitStack() as stack,
    ):
        dialled: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    dialled.append(stack.enter_context(accepted(listening)))

        thread = threading.Thread(target=serve)
        thread.start()
        with session(near, worker(facts("d"))) as one:
            why = refusal(one, asking(Endpoint("127.0.0.1", listening.getsockname()[1])))
            assert "is down: " in why.message
            wait_for(lambda: len(dialled) >= 2, LONG)
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_who_waits_for_an_answer_learns_at_once_that_the_connection_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, daemons() as (near,):
        near.kill()
        near.environment["KVD_PEER_HANDSHAKE_SECONDS"] = "600"
        near.start()
        with session(near, worker(facts("d"))) as one:
            asked = one.call(asking(Endpoint("127.0.0.1", listening.getsockname()[1])), LONG)
            with accepted(listening) as peer:
                while decode(frame(peer))[0].__class__.__name__ != "DescribeEngine":
                    pass
            error = asked.exception(SOON)
            assert isinstance(error, RefusedByDaemon)
            assert "was lost: the other side closed it" in error.refusal.message
