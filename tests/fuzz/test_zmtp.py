"""`kvd.zmtp` under inputs that nobody would send: `ZmtpError` or nothing, memory within the limits."""

from __future__ import annotations

import sys

import pytest

from kvd.zmtp import curve
from kvd.zmtp.connection import MOST_FRAMES, Connection, ConnectionLimits, SocketType
from kvd.zmtp.curve import CurveClient, CurveServer
from kvd.zmtp.errors import ZmtpError
from kvd.zmtp.events import Received, Subscribed, Unsubscribed, ZmtpEvent
from kvd.zmtp.frames import buffers, command, frame, metadata, named
from kvd.zmtp.greeting import greeting
from kvd.zmtp.mechanism import SEALED_BYTES, Mechanism
from kvd.zmtp.null import Null
from tests.support import fuzzing

LIMITS = ConnectionLimits(message=300, handshake=400, topic=20)
MOST_HELD = max(LIMITS.message, LIMITS.handshake) + SEALED_BYTES + 9
KINDS: tuple[SocketType, ...] = ("ROUTER", "DEALER", "PUB")
SERVER, CLIENT = curve.generate(), curve.generate()
LETS_IN = CurveServer(SERVER[1], lambda _key: True)
DIALS = CurveClient(CLIENT[1], SERVER[0])

Ends = tuple[Connection, Connection]


def target(data: bytes) -> None:
    """The first byte says what kind of connection takes the others, and in what state it is."""
    if not data:
        return
    way, kind, rest = data[0] % 7, KINDS[data[0] // 7 % 3], data[1:]
    if way == 6:
        one, other = sealed_ends()
        assert one._boxes is not None
        # The rest is what a peer with the right keys has in its boxes: flags, a length, the body.
        sent = b""
        while rest:
            size = rest[1] if len(rest) > 1 else 0
            before, box = one._boxes.seal(rest[0], rest[2 : 2 + size])
            sent += b"".join(frame(0, box, before))
            rest = rest[2 + size :]
        take(other, sent, 50)
        return
    mechanism: Mechanism = (Null(), Null(), Null(), LETS_IN, DIALS, LETS_IN)[way]
    said = greeting(mechanism.name, as_server=way == 4)
    if way == 1:
        peer = {"ROUTER": b"DEALER", "DEALER": b"ROUTER", "PUB": b"SUB"}[kind]
        said += command(named(b"READY", metadata(Socket_Type=peer)))
    if way == 5:
        take(sealed_ends()[1], rest, 50)
        return
    stream = rest if way == 0 else said + rest
    whole, pieces = Connection(kind, mechanism, LIMITS), Connection(kind, mechanism, LIMITS)
    result = take(whole, stream, len(stream) or 1)
    if mechanism.name == "NULL":  # under CURVE each connection has keys of its own
        assert take(pieces, stream, 1 + data[0] % 11) == result


def sealed_ends() -> Ends:
    one, other = Connection("DEALER", DIALS, LIMITS), Connection("ROUTER", LETS_IN, LIMITS)
    sent, answer = one.start(), other.start()
    while not (one.ready and other.ready):
        list(other.receive(sent))
        list(one.receive(answer + other.outgoing()))
        sent, answer = one.outgoing(), b""
    return one, other


def take(connection: Connection, stream: bytes, size: int) -> tuple[list[ZmtpEvent], str]:
    """All events of a stream in pieces of one size, and the kind of the error at its end."""
    events: list[ZmtpEvent] = []
    connection.start()
    for at in range(0, len(stream), size):
        try:
            events.extend(connection.receive(stream[at : at + size]))
        except ZmtpError as error:
            assert (connection.held, connection.wanted, connection.ready) == (0, 0, False)
            assert len(connection.outgoing()) <= LIMITS.handshake
            return events, error.kind
        finally:
            assert all(map(small, events))
        assert connection.held + connection.wanted <= MOST_HELD
    assert len(connection.outgoing()) <= LIMITS.handshake + SEALED_BYTES
    return events, ""


def small(event: ZmtpEvent) -> bool:
    match event:
        case Received(body, frames, size):
            return len(body) <= size <= LIMITS.message and 1 <= frames <= MOST_FRAMES
        case Subscribed(topic) | Unsubscribed(topic):
            return len(topic) <= LIMITS.topic
    return True


BEGIN = [
    bytes((way,)) + data
    for way in range(21)
    for data in (
        b"",
        greeting("NULL", as_server=False),
        command(named(b"READY", metadata(Socket_Type=b"DEALER", Identity=b"me"))),
        command(named(b"ERROR", b"\x03400")),
        command(named(b"PING", b"\0\0context")),
        command(named(b"SUBSCRIBE", b"topic")) + command(named(b"CANCEL", b"topic")),
        b"".join(buffers(b"\1topic") + buffers(b"a", b"b", b"c") + buffers(bytes(299))),
        b"\0\3abc\1\1a\0\0\2\7\4PING\0\0\2\5\4PONG",
        command(named(b"HELLO", b"\1\0" + bytes(192))),
        command(named(b"WELCOME", bytes(160))),
        b"\0\x21\7MESSAGE" + bytes(25),
    )
]


@pytest.mark.parametrize("data", fuzzing.corpus("zmtp"), ids=range(len(fuzzing.corpus("zmtp"))))
def test_what_was_found_is_taken(data: bytes) -> None:
    target(data)


@pytest.mark.parametrize("seed", fuzzing.SEEDS)
def test_what_resembles_it_is_taken(seed: int) -> None:
    for data in fuzzing.mutated(fuzzing.corpus("zmtp"), fuzzing.A_SEED, seed):
        try:
            target(data)
        except BaseException as error:
            error.add_note(f"the input was {data.hex()}")
            raise


if __name__ == "__main__":
    fuzzing.search("zmtp", target, "kvd.zmtp", float(sys.argv[1]), BEGIN)
