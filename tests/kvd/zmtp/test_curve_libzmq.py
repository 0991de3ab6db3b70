"""CURVE with libzmq on the other side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from zmq.auth.thread import ThreadAuthenticator

from kvd.zmtp import curve
from kvd.zmtp.curve import CurveClient, CurveServer
from kvd.zmtp.errors import ZmtpError
from kvd.zmtp.events import Handshaken, Received
from tests.support.zmtp_shim import Shim, dial, listening, sockets

SERVER, CLIENT = curve.generate(), curve.generate()


def test_keys_are_libzmqs() -> None:
    public, secret = zmq.curve_keypair()
    assert curve.public_of(secret) == public
    public, secret = curve.generate()
    assert zmq.curve_public(secret) == public


def test_a_client_with_a_known_key_talks_to_our_router() -> None:
    with sockets() as context, listening() as (listener, address), context.socket(zmq.DEALER) as client:
        client.curve_publickey, client.curve_secretkey = CLIENT
        client.curve_serverkey = SERVER[0]
        client.routing_id = b"far"
        client.heartbeat_ivl, client.heartbeat_timeout = 20, 1000
        client.connect(address)
        with listener.accept()[0] as stream:
            peer = Shim(stream, "ROUTER", CurveServer(SERVER[1], lambda key: key == CLIENT[0]))
            assert peer.event() == Handshaken("DEALER", CLIENT[0])
            for body in (b"", b"x", b"y" * 300, b"z" * (1 << 20)):
                client.send(body)
                assert peer.event() == Received(body, 1, len(body))
                peer.send(body)
                assert client.recv_multipart() == [body]
            client.send_multipart([b"", b"two"])
            assert peer.event() == Received(b"", 2, 3)
            peer.send(b"a", b"", b"c")
            assert client.recv_multipart() == [b"a", b"", b"c"]
            answered = 0
            while answered < 3:
                assert list(peer.connection.receive(stream.recv(1 << 16))) == []
                answer = peer.connection.outgoing()
                answered += bool(answer)
                stream.sendall(answer)
            client.send(b"still here")
            assert peer.event() == Received(b"still here", 1, 10)


@pytest.mark.parametrize("wrong", ["unknown client", "unknown server"])
def test_a_client_with_a_wrong_key_is_refused(wrong: str) -> None:
    expected = SERVER[0] if wrong == "unknown client" else curve.generate()[0]
    asked: list[bytes] = []

    def nobody(key: bytes) -> bool:
        asked.append(key)
        return False

    with sockets() as context, listening() as (listener, address), context.socket(zmq.DEALER) as client:
        client.curve_publickey, client.curve_secretkey = CLIENT
        client.curve_serverkey = expected
        with client.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH) as monitor:
            client.connect(address)
            with listener.accept()[0] as stream:
                peer = Shim(stream, "ROUTER", CurveServer(SERVER[1], nobody))
                with pytest.raises(ZmtpError) as caught:
                    peer.event()
            if wrong == "unknown client":
                assert asked == [CLIENT[0]]
                assert caught.value.kind == "not_authorised"
                assert CLIENT[0].decode() in caught.value.message
                assert monitor.poll(10_000)  # it is told why
            else:
                assert asked == []
                assert caught.value.kind == "other_key"
            client.disable_monitor()


@contextmanager
def authenticated(*keys: bytes) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """libzmq's ROUTER with CURVE, and its address; it lets these keys in."""
    with sockets() as context:
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        try:
            authenticator.configure_curve_callback(credentials_provider=_Known(keys))
            with context.socket(zmq.ROUTER) as server:
                server.curve_server = True
                server.curve_publickey, server.curve_secretkey = SERVER
                port = server.bind_to_random_port("tcp://127.0.0.1")
                yield server, f"tcp://127.0.0.1:{port}"
        finally:
            authenticator.stop()


class _Known:
    def __init__(self, keys: tuple[bytes, ...]) -> None:
        self._keys = set(keys)

    def callback(self, domain: str, key: bytes) -> bool:
        assert domain == "*" or not domain
        return key in self._keys


def test_our_client_talks_to_a_server_that_knows_it() -> None:
    with authenticated(CLIENT[0]) as (server, address), dial(address) as stream:
        peer = Shim(stream, "DEALER", CurveClient(CLIENT[1], SERVER[0]))
        assert peer.event() == Handshaken("ROUTER", SERVER[0])
        for body in (b"", b"y" * 300, b"z" * (1 << 20)):
            peer.send(body)
            route, taken = server.recv_multipart()
            assert taken == body
            server.send_multipart([route, body])
            assert peer.event() == Received(body, 1, len(body))


def test_our_client_is_told_that_a_server_does_not_know_it() -> None:
    with authenticated() as (_, address), dial(address) as stream:
        with pytest.raises(ZmtpError, match="the peer refuses: '400'") as caught:
            Shim(stream, "DEALER", CurveClient(CLIENT[1], SERVER[0])).event()
        assert caught.value.kind == "not_authorised"


def test_our_client_goes_from_a_server_with_another_key() -> None:
    with (
        authenticated(CLIENT[0]) as (_, address),
        dial(address) as stream,
        pytest.raises((ZmtpError, EOFError)),
    ):
        Shim(stream, "DEALER", CurveClient(CLIENT[1], curve.generate()[0])).event()
