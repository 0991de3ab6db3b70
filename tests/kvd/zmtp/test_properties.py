"""Any bytes, in any pieces: the same events, `ZmtpError` or nothing, and never more memory than the limits allow."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.zmtp import curve
from kvd.zmtp.connection import Connection, ConnectionLimits, SocketType
from kvd.zmtp.curve import CurveClient, CurveServer
from kvd.zmtp.errors import ZmtpError
from kvd.zmtp.events import ZmtpEvent
from kvd.zmtp.frames import buffers, command, header, metadata, named
from kvd.zmtp.greeting import greeting
from kvd.zmtp.mechanism import SEALED_BYTES, Mechanism
from kvd.zmtp.null import Null

SERVER, CLIENT = curve.generate(), curve.generate()
LIMITS = ConnectionLimits(message=2000, handshake=600, topic=30)
MOST_HELD = LIMITS.message + SEALED_BYTES + 9
MECHANISMS: dict[str, Mechanism] = {
    "null": Null(),
    "server": CurveServer(SERVER[1], lambda _key: True),
    "client": CurveClient(CLIENT[1], SERVER[0]),
}
GREETINGS = {
    "null": greeting("NULL", as_server=False),
    "server": greeting("CURVE", as_server=False),
    "client": greeting("CURVE", as_server=True),
}

kinds = st.sampled_from(["ROUTER", "DEALER", "PUB"])
names = st.sampled_from(
    [b"READY", b"ERROR", b"PING", b"PONG", b"SUBSCRIBE", b"CANCEL", b"HELLO", b"INITIATE", b"X"]
)
bodies = st.binary(max_size=40) | st.integers(0, 3000).map(bytes)
ready = st.builds(
    lambda kind, more: command(named(b"READY", metadata(Socket_Type=kind, **more))),
    st.sampled_from([b"DEALER", b"ROUTER", b"SUB"]),
    st.dictionaries(st.sampled_from(["Identity", "X_a", "Resource"]), st.binary(max_size=20), max_size=2),
)
pieces_of_a_stream = st.one_of(
    st.builds(lambda frames: b"".join(buffers(*frames)), st.lists(bodies, min_size=1, max_size=4)),
    st.builds(lambda name, data: command(named(name, data)), names, bodies),
    st.builds(header, st.integers(0, 255), st.integers(0, 1 << 64 - 1)),
    st.binary(max_size=100),
)
streams = st.builds(
    lambda hello, rest: hello + b"".join(rest), ready | st.just(b""), st.lists(pieces_of_a_stream, max_size=6)
)


def told(connection: Connection, pieces: Iterator[bytes]) -> tuple[list[ZmtpEvent], str]:
    """All events, and the error at the end, if any. Memory is looked at after each piece."""
    events: list[ZmtpEvent] = []
    connection.start()
    for piece in pieces:
        try:
            events.extend(connection.receive(piece))
        except ZmtpError as error:
            assert (connection.held, connection.wanted) == (0, 0)
            return events, f"{error.kind}: {error.message}"
        assert connection.held <= MOST_HELD
        assert connection.held + connection.wanted <= MOST_HELD
        assert len(connection._handshake) <= 4096
    return events, ""


def cut(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    at = 0
    for size in sizes:
        yield data[at : at + size]
        at += size
    yield data[at:]


@settings(max_examples=200, deadline=None)
@given(kinds, streams, st.lists(st.integers(0, 80), max_size=100))
def test_any_cut_of_a_stream_gives_the_same_events(kind: SocketType, stream: bytes, sizes: list[int]) -> None:
    data = GREETINGS["null"] + stream
    whole = told(Connection(kind, Null(), LIMITS), iter([data]))
    assert told(Connection(kind, Null(), LIMITS), cut(data, sizes)) == whole
    assert told(Connection(kind, Null(), LIMITS), (bytes([byte]) for byte in data)) == whole


@settings(max_examples=200, deadline=None)
@given(kinds, st.sampled_from(sorted(MECHANISMS)), streams, st.booleans())
def test_any_bytes_are_an_error_or_nothing(
    kind: SocketType, which: str, stream: bytes, greeted: bool
) -> None:
    told(Connection(kind, MECHANISMS[which], LIMITS), iter([(GREETINGS[which] if greeted else b"") + stream]))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_changed_byte_under_curve_is_an_error_or_changes_nothing(data: st.DataObject) -> None:
    ends = (
        Connection("DEALER", MECHANISMS["client"], LIMITS),
        Connection("ROUTER", MECHANISMS["server"], LIMITS),
    )
    waiting = [ends[1].start(), ends[0].start()]  # for the first end, for the second
    changed_in = data.draw(st.integers(0, 7), "changed step")
    try:
        for step in range(8):
            side = step % 2
            stream, waiting[side] = waiting[side], b""
            if step == changed_in and stream:
                at = data.draw(st.integers(0, len(stream) - 1), "at")
                stream = stream[:at] + bytes([data.draw(st.integers(0, 255), "byte")]) + stream[at + 1 :]
            list(ends[side].receive(stream))
            waiting[1 - side] += ends[side].outgoing()
            if ends[side].ready:
                waiting[1 - side] += b"".join(ends[side].message(b"body %d" % step))
    except ZmtpError:
        return
