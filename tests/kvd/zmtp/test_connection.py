"""A connection, byte by byte: what it takes, what it refuses, and what it keeps meanwhile."""

from __future__ import annotations

import pytest

from kvd.zmtp.connection import MOST_FRAMES, Connection, ConnectionLimits, SocketType
from kvd.zmtp.errors import ZmtpError
from kvd.zmtp.events import Handshaken, Received, Subscribed, Unsubscribed, ZmtpEvent
from kvd.zmtp.frames import COMMAND, LONG, MORE, MOST_ITEMS, buffers, command, header, metadata, named
from kvd.zmtp.greeting import greeting
from kvd.zmtp.null import Null

GREETING = greeting("NULL", as_server=False)
LIMITS = ConnectionLimits(message=1000, handshake=200, topic=20)


def ready(socket_type: str = "DEALER", **more: bytes) -> bytes:
    return command(named(b"READY", metadata(Socket_Type=socket_type.encode(), **more)))


def connected(
    kind: SocketType = "ROUTER", peer: str = "DEALER", limits: ConnectionLimits = LIMITS
) -> Connection:
    connection = Connection(kind, Null(), limits)
    assert connection.start().startswith(GREETING)
    (event,) = connection.receive(GREETING + ready(peer))
    assert event == Handshaken(peer, b"")
    assert connection.outgoing() == b""
    return connection


def refused(connection: Connection, data: bytes) -> ZmtpError:
    with pytest.raises(ZmtpError) as caught:
        list(connection.receive(data))
    assert (connection.held, connection.wanted, connection.ready) == (0, 0, False)
    with pytest.raises(ZmtpError):
        list(connection.receive(b"more"))
    assert connection.held == 0
    return caught.value


def test_all_that_this_side_says_of_itself_goes_out_at_once() -> None:
    connection = Connection("ROUTER", Null(), LIMITS)
    assert connection.start() == GREETING + ready("ROUTER", Identity=b"")
    assert Connection("PUB", Null(), LIMITS).start() == GREETING + ready("PUB")
    assert Connection("DEALER", Null(), LIMITS).start() == GREETING + ready("DEALER", Identity=b"")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GET / HTTP/1.1\r\n", "does not speak ZMTP 3"),
        (b"\1\0", "does not speak ZMTP 3"),  # ZMTP 1: a frame with an identity
        (b"\xff" + bytes(8) + b"\0", "does not speak ZMTP 3"),
        (GREETING[:10] + b"\1", "speaks version 1 of ZMTP, this side 3.1"),  # 2.0
        (GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32), "mechanism is b'CURVE', this side's NULL"),
        (GREETING[:12] + b"\xff" * 20 + bytes(32), "this side's NULL"),
    ],
)
def test_what_does_not_greet_as_this_side_does_is_refused_at_once(data: bytes, says: str) -> None:
    error = refused(Connection("ROUTER", Null(), LIMITS), data)
    assert (error.code, error.kind) == ("KVD-ZMTP", "greeting")
    assert says in error.message


def test_the_beginning_of_a_greeting_and_silence_does_nothing() -> None:
    connection = Connection("ROUTER", Null(), LIMITS)
    for byte in GREETING[:9]:
        assert list(connection.receive(bytes([byte]))) == []
    assert (connection.held, connection.wanted, connection.outgoing()) == (9, 0, b"")


def test_a_newer_version_and_whatever_fills_the_signature_are_taken() -> None:
    connection = Connection("ROUTER", Null(), LIMITS)
    newer = b"\xff" + b"\7" * 8 + b"\x7f\4\0" + GREETING[12:]
    assert list(connection.receive(newer + ready())) == [Handshaken("DEALER", b"")]


@pytest.mark.parametrize(
    ("data", "kind", "says"),
    [
        (buffers(b"too early")[0], "protocol", "a message of 9 bytes before the handshake is over"),
        (header(COMMAND, 201), "too_large", "a command of the handshake has 201 bytes, the limit is 200"),
        (header(COMMAND, 1 << 63), "too_large", "the limit is 200"),
        (header(COMMAND | MORE, 9), "protocol", "begins with 0x05"),
        (b"\x08\0", "protocol", "begins with 0x08"),
        (command(b""), "protocol", "a command of 0 bytes has no name"),
        (command(b"\0"), "protocol", "a command of 1 bytes has no name"),
        (command(b"\7READY"), "protocol", "a command of 6 bytes has no name"),
        (command(named(b"PING", b"\0\0")), "protocol", "expected READY, the peer sends the command b'PING'"),
        (command(named(b"HELLO")), "protocol", "expected READY"),
        (command(named(b"ERROR", b"\x03400")), "not_authorised", "the peer refuses: '400'"),
        (command(named(b"ERROR", b"\x05\x1b[2J\n")), "protocol", r"the peer refuses: '\x1b[2J\n'"),
        (command(named(b"ERROR")), "protocol", "the peer refuses: ''"),
        (ready("SUB"), "protocol", "the peer is a 'SUB', a ROUTER talks to DEALER or REQ or ROUTER"),
        (ready("\x1b"), "protocol", r"the peer is a '\x1b'"),
        (command(named(b"READY")), "protocol", "the peer is a ''"),
        (command(named(b"READY", b"\x0bSocket-Type\0\0\0\7DEALER")), "protocol", "ends within an entry"),
        (command(named(b"READY", b"\x0bSocket-Type\xff\xff\xff\xff")), "protocol", "ends within an entry"),
        (command(named(b"READY", b"\x0bSocket")), "protocol", "ends within an entry"),
        (command(named(b"READY", b"\0\0\0\0\0")), "protocol", "an empty name"),
    ],
)
def test_a_handshake_that_is_none_is_refused(data: bytes, kind: str, says: str) -> None:
    connection = Connection("ROUTER", Null(), LIMITS)
    error = refused(connection, GREETING + data)
    assert error.kind == kind
    assert says in error.message


def test_metadata_is_little() -> None:
    limits = ConnectionLimits(message=1000)
    some = {f"X-{number}": b"" for number in range(MOST_ITEMS - 1)}
    assert list(Connection("ROUTER", Null(), limits).receive(GREETING + ready("DEALER", **some)))
    error = refused(Connection("ROUTER", Null(), limits), GREETING + ready("DEALER", **some, more=b""))
    assert (error.kind, error.message) == ("too_large", f"metadata has more than {MOST_ITEMS} entries")
    error = refused(Connection("ROUTER", Null(), limits), GREETING + ready(identity=b"a", Identity=b"b"))
    assert error.message == "metadata names 'identity' twice"
    error = refused(Connection("ROUTER", Null(), limits), GREETING + ready(Identity=bytes(256)))
    assert (error.kind, error.message) == ("too_large", "an identity has 256 bytes, the limit is 255")


@pytest.mark.parametrize(
    "data",
    [
        ready("\x1b" * 150),
        command(named(b"\x1b" * 150)),
        command(named(b"ERROR", b"\x96" + b"\x1b" * 150)),
        command(named(b"READY", named(b"\x1b" * 90, bytes(4)) * 2)),
    ],
)
def test_an_error_is_short_and_has_no_control_characters(data: bytes) -> None:
    message = refused(Connection("ROUTER", Null(), LIMITS), GREETING + data).message
    assert message.isprintable()
    assert len(message) < 250


def test_a_second_ready_is_a_command_that_means_nothing() -> None:
    connection = connected()
    assert list(connection.receive(ready() + command(named(b"JOIN", b"x")) + header(0, 1) + b"x")) == [
        Received(b"x", 1, 1)
    ]


def test_what_is_wanted_is_known_with_a_frames_header() -> None:
    connection = connected(limits=ConnectionLimits(message=100_000))
    seen = []
    frame = b"".join(buffers(bytes(100_000)))
    for at in range(0, len(frame), 10_000):
        events = list(connection.receive(frame[at : at + 10_000]))
        seen.append((connection.wanted, connection.held, len(events)))
    assert seen[0] == (100_009 - 10_000, 10_000 - 9, 0)
    assert seen[-2:] == [(9, 100_000 - 9, 0), (0, 0, 1)]
    assert list(connection.receive(header(0, 70_000)[:8])) == []
    assert (connection.wanted, connection.held) == (0, 8)


def test_a_message_over_the_limit_is_refused_by_its_header() -> None:
    assert list(connected().receive(b"".join(buffers(bytes(1000))))) == [Received(bytes(1000), 1, 1000)]
    for size in (1001, 1 << 32, (1 << 64) - 1):
        error = refused(connected(), header(0, size))
        assert (error.kind, error.message) == ("too_large", f"a message has {size} bytes, the limit is 1000")


def test_a_message_of_several_frames_is_counted_and_never_kept() -> None:
    connection = connected()
    several = b"".join(buffers(b"a", b"", b"c" * 600))
    assert list(connection.receive(several + b"".join(buffers(b"one")))) == [
        Received(b"", 3, 601),
        Received(b"one", 1, 3),
    ]
    assert list(connection.receive(several[:500])) == []
    assert (connection.held, connection.wanted) == (0, 0)
    assert list(connection.receive(several[500:])) == [Received(b"", 3, 601)]


def test_a_message_of_several_frames_has_a_limit_of_bytes_and_of_frames() -> None:
    connection = connected()
    assert list(connection.receive(header(MORE, 600) + bytes(600))) == []
    error = refused(connection, header(MORE, 401))
    assert (error.kind, error.message) == ("too_large", "a message has 1001 bytes, the limit is 1000")
    assert list(connected().receive(b"".join(buffers(*[b""] * MOST_FRAMES)))) == [
        Received(b"", MOST_FRAMES, 0)
    ]
    error = refused(connected(), b"".join(buffers(*[b""] * (MOST_FRAMES + 1))))
    assert (error.kind, error.message) == ("too_large", f"a message has more than {MOST_FRAMES} frames")


def test_a_command_between_the_frames_of_a_message_is_obeyed() -> None:
    connection = connected()
    ping = command(named(b"PING", b"\0\0now"))
    assert list(connection.receive(header(MORE, 1) + b"a" + ping + header(0, 1) + b"b")) == [
        Received(b"", 2, 2)
    ]
    assert connection.outgoing() == command(named(b"PONG", b"now"))


def test_of_many_pings_one_answer_waits() -> None:
    connection = connected()
    pings = b"".join(command(named(b"PING", b"\0\0" + str(number).encode())) for number in range(10_000))
    assert list(connection.receive(pings)) == []
    assert connection.outgoing() == command(named(b"PONG", b"9999"))
    assert connection.outgoing() == b""


@pytest.mark.parametrize("context", [b"", b"\0", bytes(2 + 17)])
def test_a_ping_wants_back_at_most_16_bytes(context: bytes) -> None:
    error = refused(connected(), command(named(b"PING", context)))
    assert error.kind == "protocol"
    assert f"PING has {len(context)} bytes, 2 to 18 are allowed" in error.message


def test_commands_have_a_limit() -> None:
    error = refused(connected(), header(COMMAND, 201))
    assert (error.kind, error.message) == ("too_large", "a command has 201 bytes, the limit is 200")
    assert refused(connected(), command(named(b"ERROR", b"\2no"))).message == "the peer refuses: 'no'"


def test_who_reads_our_events_subscribes_in_two_ways() -> None:
    connection = connected("PUB", "SUB")
    sent: list[tuple[bytes, ZmtpEvent]] = [
        (command(named(b"SUBSCRIBE", b"a")), Subscribed(b"a")),
        (command(named(b"CANCEL", b"a")), Unsubscribed(b"a")),
        (b"".join(buffers(b"\1")), Subscribed(b"")),
        (b"".join(buffers(b"\1" + b"t" * 20)), Subscribed(b"t" * 20)),
        (b"".join(buffers(b"\0a")), Unsubscribed(b"a")),
    ]
    for data, event in sent:
        assert list(connection.receive(data)) == [event]
    for ignored in (b"", b"\2a"):
        assert list(connection.receive(b"".join(buffers(ignored)))) == []
    assert list(connection.receive(b"".join(buffers(b"\1a", b"b")))) == []
    for long in (
        command(named(b"SUBSCRIBE", bytes(21))),
        header(0, 22),
        command(named(b"CANCEL", bytes(21))),
    ):
        assert refused(connected("PUB", "XSUB"), long).kind == "too_large"


def test_a_router_is_not_subscribed_to() -> None:
    connection = connected()
    assert list(connection.receive(command(named(b"SUBSCRIBE", b"a")))) == []
    assert list(connection.receive(b"".join(buffers(b"\1a")))) == [Received(b"\1a", 1, 2)]


def test_who_stops_taking_events_may_go_on_later() -> None:
    connection = connected()
    data = b"".join(b"".join(buffers(str(number).encode())) for number in range(100))
    events = connection.receive(data[:-1])
    assert [next(events), next(events)] == [Received(b"0", 1, 1), Received(b"1", 1, 1)]
    assert connection.held == len(data) - 1
    assert next(connection.receive(b"")) == Received(b"2", 1, 1)
    assert next(connection.receive(data[-1:])) == Received(b"3", 1, 1)
    assert next(events) == Received(b"4", 1, 1)  # an older iterator does no harm
    rest = list(connection.receive(b""))
    assert rest == [Received(str(number).encode(), 1, len(str(number))) for number in range(5, 100)]
    assert connection.held == 0


def test_small_bodies_are_sent_behind_their_header_and_large_ones_are_not_copied() -> None:
    connection = connected()
    assert connection.message(b"a") == [b"\0\1a"]
    large = bytes(5000)
    first, second, third = connection.message(large, b"b")
    assert (first, third) == (bytes((LONG | MORE,)) + (5000).to_bytes(8, "big"), b"\0\1b")
    assert second is large


def test_nothing_is_sent_before_the_handshake_is_over() -> None:
    connection = Connection("ROUTER", Null(), LIMITS)
    with pytest.raises(RuntimeError, match="wait for Handshaken"):
        connection.message(b"a")


def test_an_answer_to_a_ping_means_nothing() -> None:
    assert list(connected().receive(command(named(b"PONG", b"")))) == []
