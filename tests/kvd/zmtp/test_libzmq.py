"""Real ZeroMQ sockets and ours understand each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvd.zmtp.connection import Connection, ConnectionLimits, SocketType
from kvd.zmtp.errors import ZmtpError
from kvd.zmtp.events import Handshaken, Received, Subscribed, Unsubscribed
from kvd.zmtp.frames import command, named
from kvd.zmtp.null import Null
from tests.support.zmtp_shim import LIMITS, Shim, dial, listening, sockets


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with sockets() as context:
        yield context


@pytest.mark.parametrize("local", [True, False])
def test_a_dealer_talks_to_our_router(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, local: bool
) -> None:
    with (
        listening(tmp_path / "s" if local else None) as (listener, address),
        context.socket(zmq.DEALER) as client,
    ):
        client.routing_id = b"worker-1"
        client.connect(address)
        with listener.accept()[0] as stream:
            peer = Shim(stream, "ROUTER")
            assert peer.event() == Handshaken("DEALER", b"")
            for body in (b"", b"x", b"y" * 255, b"z" * 256, b"w" * (1 << 20)):
                client.send(body)
                assert peer.event() == Received(body, 1, len(body))
                peer.send(body)
                assert client.recv_multipart() == [body]
            peer.send(b"a", b"b" * 5000, b"")
            assert client.recv_multipart() == [b"a", b"b" * 5000, b""]


def test_of_a_message_of_several_frames_only_their_number_and_size_are_kept(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    with listening() as (listener, address), context.socket(zmq.REQ) as client:
        client.connect(address)
        client.send(b"question")
        with listener.accept()[0] as stream:
            peer = Shim(stream, "ROUTER")
            assert peer.event() == Handshaken("REQ", b"")
            assert peer.event() == Received(b"", 2, 8)
            peer.send(b"", b"answer")
            assert client.recv() == b"answer"


@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.REP, zmq.DEALER])
def test_our_dealer_talks_to_what_listens(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> None:
    with context.socket(kind) as server:
        port = server.bind_to_random_port("tcp://127.0.0.1")
        with dial(f"tcp://127.0.0.1:{port}") as stream:
            peer = Shim(stream, "DEALER")
            greeted = peer.event()
            assert isinstance(greeted, Handshaken)
            assert zmq.SocketType[greeted.socket_type] == kind
            before = [b""] if kind == zmq.REP else []
            peer.send(*before, b"question")
            *route, question = server.recv_multipart()
            assert question == b"question"
            server.send_multipart([*route, b"answer"])
            answer = Received(b"answer", 1, 6) if not before else Received(b"", 2, 6)
            assert peer.event() == answer


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.XSUB])
def test_our_publisher_hears_what_is_subscribed_to(
    context: zmq.Context[zmq.Socket[bytes]], kind: int
) -> None:
    with listening() as (listener, address), context.socket(kind) as reader:
        reader.connect(address)
        with listener.accept()[0] as stream:
            peer = Shim(stream, "PUB")
            if kind == zmq.SUB:
                reader.subscribe(b"engine")
            else:
                reader.send(b"\1engine")
            greeted = peer.event()
            assert isinstance(greeted, Handshaken)
            assert peer.event() == Subscribed(b"engine")
            peer.send(b"engine.ready", b"body")
            assert reader.recv_multipart() == [b"engine.ready", b"body"]
            if kind == zmq.SUB:
                reader.unsubscribe(b"engine")
            else:
                reader.send(b"\0engine")
            assert peer.event() == Unsubscribed(b"engine")


def test_a_peer_that_sends_heartbeats_is_answered(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with listening() as (listener, address), context.socket(zmq.DEALER) as client:
        client.heartbeat_ivl, client.heartbeat_timeout = 20, 200
        client.connect(address)
        with listener.accept()[0] as stream:
            peer = Shim(stream, "ROUTER")
            assert isinstance(peer.event(), Handshaken)
            client.send_string("after many heartbeats")
            assert isinstance(peer.event(), Received)
            answered = 0
            while answered < 20:  # unanswered, the client would have gone after 200 ms
                assert list(peer.connection.receive(stream.recv(1 << 16))) == []
                answer = peer.connection.outgoing()
                assert answer == b"\4\5\4PONG"
                stream.sendall(answer)
                answered += 1
            stream.sendall(command(named(b"PING", bytes(2))))
            assert list(peer.connection.receive(stream.recv(1 << 16))) == []
            client.send(b"still here")
            assert peer.event() == Received(b"still here", 1, 10)


def test_a_socket_of_a_kind_that_does_not_fit_is_refused(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    kinds: dict[int, SocketType] = {zmq.SUB: "ROUTER", zmq.DEALER: "PUB", zmq.PULL: "DEALER"}
    for kind, ours in kinds.items():
        with listening() as (listener, address), context.socket(kind) as client:
            client.connect(address)
            # libzmq may see first that the two do not fit, and goes.
            with listener.accept()[0] as stream, pytest.raises((ZmtpError, EOFError, ConnectionError)):
                Shim(stream, ours).event()


def test_a_client_with_another_mechanism_is_refused(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with listening() as (listener, address), context.socket(zmq.DEALER) as client:
        client.plain_username, client.plain_password = b"user", b"word"
        client.connect(address)
        with listener.accept()[0] as stream:
            connection = Connection("ROUTER", Null(), LIMITS)
            # As much as lets the client say its mechanism; at ours it would go without a word.
            stream.sendall(connection.start()[:11])
            greeting = b""
            while len(greeting) < 64:
                greeting += stream.recv(64)
            with pytest.raises(ZmtpError, match="b'PLAIN', this side's NULL") as caught:
                list(connection.receive(greeting))
        assert caught.value.kind == "greeting"


def test_a_frame_over_the_limit_is_refused_by_its_header(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    limits = ConnectionLimits(message=1000)
    with listening() as (listener, address), context.socket(zmq.DEALER) as client:
        client.connect(address)
        client.send(bytes(1000))
        with listener.accept()[0] as stream:
            peer = Shim(stream, "ROUTER", limits=limits)
            assert isinstance(peer.event(), Handshaken)
            assert peer.event() == Received(bytes(1000), 1, 1000)
            client.send(bytes(1001))
            with pytest.raises(ZmtpError, match="a message has 1001 bytes, the limit is 1000") as caught:
                peer.event()
            assert caught.value.kind == "too_large"


def test_a_client_comes_back_after_a_refusal(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with listening() as (listener, address), context.socket(zmq.DEALER) as client:
        client.reconnect_ivl = 10
        client.connect(address)
        listener.accept()[0].close()
        client.send(b"here again")
        with listener.accept()[0] as stream:
            peer = Shim(stream, "ROUTER")
            assert isinstance(peer.event(), Handshaken)
            assert peer.event() == Received(b"here again", 1, 10)
