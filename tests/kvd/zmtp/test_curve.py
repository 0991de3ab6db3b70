"""CURVE without libzmq: commands that are cut, changed, repeated or out of order, and keys that are wrong."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest

from kvd.zmtp import curve
from kvd.zmtp.connection import LARGE_BOX, MOST_FRAMES, Connection, ConnectionLimits
from kvd.zmtp.curve import CurveClient, CurveServer
from kvd.zmtp.errors import ZmtpError
from kvd.zmtp.events import Handshaken, LargeBox, Received
from kvd.zmtp.frames import COMMAND, MORE, command, header, named
from kvd.zmtp.greeting import BYTES
from kvd.zmtp.mechanism import SEALED_BYTES

SERVER, CLIENT, OTHER = curve.generate(), curve.generate(), curve.generate()
LIMITS = ConnectionLimits(message=1000)


def server(*known: bytes) -> Connection:
    return Connection("ROUTER", CurveServer(SERVER[1], (known or (CLIENT[0],)).__contains__), LIMITS)


def pair_for(size: int) -> tuple[Connection, Connection]:
    """A client and a server that take messages of so many bytes."""
    limits = ConnectionLimits(message=size)
    one = Connection("DEALER", CurveClient(CLIENT[1], SERVER[0]), limits)
    other = Connection("ROUTER", CurveServer(SERVER[1], {CLIENT[0]}.__contains__), limits)
    handshake(one, other)
    return one, other


def client(expected: bytes = SERVER[0]) -> Connection:
    return Connection("DEALER", CurveClient(CLIENT[1], expected), LIMITS)


def handshake(one: Connection, other: Connection) -> list[bytes]:
    """What the two send until both are ready: the server's greeting, HELLO, WELCOME, INITIATE, READY."""
    sent = [other.start(), one.start()]
    list(one.receive(sent[0]))
    list(other.receive(sent[1]))
    for sender, receiver in ((other, one), (one, other), (other, one)):
        sent.append(sender.outgoing())
        list(receiver.receive(sent[-1]))
    assert one.ready
    assert other.ready
    return sent


def pair() -> tuple[Connection, Connection]:
    one, other = client(), server()
    handshake(one, other)
    return one, other


def refused(connection: Connection, data: bytes) -> ZmtpError:
    with pytest.raises(ZmtpError) as caught:
        list(connection.receive(data))
    assert not connection.ready
    return caught.value


def test_both_sides_know_whom_they_talk_to() -> None:
    one, other = client(), server()
    assert list(other.receive(one.start())) == []
    assert list(one.receive(other.start() + other.outgoing())) == []
    assert list(other.receive(one.outgoing())) == [Handshaken("DEALER", CLIENT[0])]
    assert list(one.receive(other.outgoing())) == [Handshaken("ROUTER", SERVER[0])]


def test_a_secret_key_is_never_printed() -> None:
    text = repr(CurveServer(SERVER[1], bool)) + repr(CurveClient(CLIENT[1], SERVER[0]))
    assert SERVER[1].decode() not in text
    assert CLIENT[1].decode() not in text


@pytest.mark.parametrize(
    "key", [b"", b"short", b" " * 40, CLIENT[0] + b"00000"], ids=["empty", "short", "blank", "long"]
)
def test_a_key_that_is_none_is_a_value_error(key: bytes) -> None:
    with pytest.raises(ValueError, match=r"Z85|characters"):
        Connection("ROUTER", CurveServer(key, bool), LIMITS)


def test_who_is_let_in_is_asked_anew_for_each_connection() -> None:
    known: set[bytes] = set()
    mechanism = CurveServer(SERVER[1], known.__contains__)
    for expected in (False, True, False):
        known.symmetric_difference_update({CLIENT[0]} if expected or known else ())
        one, other = client(), Connection("ROUTER", mechanism, LIMITS)
        list(other.receive(one.start()))
        list(one.receive(other.start() + other.outgoing()))
        if expected:
            assert list(other.receive(one.outgoing())) == [Handshaken("DEALER", CLIENT[0])]
        else:
            error = refused(other, one.outgoing())
            assert (error.kind, error.key) == ("not_authorised", CLIENT[0])
            assert other.outgoing() == command(b"\5ERROR\x03400")


def test_a_client_that_expects_another_server_gets_nowhere() -> None:
    error = refused(server(), client(OTHER[0]).start())
    assert (error.kind, error.farewell) == ("other_key", b"")
    assert "HELLO cannot be opened" in error.message


def test_a_server_that_has_another_key_is_not_believed() -> None:
    impostor = Connection("ROUTER", CurveServer(OTHER[1], lambda _key: True), LIMITS)
    list(impostor.receive(client(OTHER[0]).start()))
    one = client()
    one.start()
    assert "WELCOME cannot be opened" in refused(one, impostor.start() + impostor.outgoing()).message


def test_nobody_passes_for_another_with_a_public_key_alone() -> None:
    """INITIATE names CLIENT's key, but its voucher is sealed with another secret."""
    one, other = client(), server()
    security = one._security
    assert isinstance(security, curve.CurveClientHandshake)
    first = one.start()
    list(other.receive(first))
    security._secret = curve._raw(OTHER[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curve, "crypto_scalarmult_base", lambda _secret: curve._raw(CLIENT[0]))
        list(one.receive(other.start() + other.outgoing()))
    error = refused(other, one.outgoing())
    assert (error.kind, error.message) == (
        "protocol",
        "the voucher in INITIATE cannot be opened: another key, or changed on the way",
    )


def test_a_voucher_for_another_server_is_not_taken() -> None:
    one, other = client(), server()
    list(other.receive(one.start()))
    security = one._security
    assert isinstance(security, curve.CurveClientHandshake)
    security._server = curve._raw(OTHER[0])
    list(one.receive(other.start() + other.outgoing()))
    assert "for another connection or server" in refused(other, one.outgoing()).message


@pytest.mark.parametrize("step", ["HELLO", "WELCOME", "INITIATE", "READY"])
@pytest.mark.parametrize("change", ["cut", "long", "bit", "again", "renamed"])
def test_a_command_that_is_not_as_it_should_be_is_refused(step: str, change: str) -> None:
    one, other = client(), server()
    sender, receiver = (one, other) if step in {"HELLO", "INITIATE"} else (other, one)
    starts = {one: one.start(), other: other.start()}
    if step == "HELLO":
        whole = starts[one][BYTES:]
        starts[one] = starts[one][:BYTES]
    else:
        list(other.receive(starts[one]))
        whole = b""
    if step == "HELLO":
        list(other.receive(starts[one]))
    elif step == "WELCOME":
        list(one.receive(starts[other]))
    else:
        list(one.receive(starts[other] + other.outgoing()))
        if step == "READY":
            list(other.receive(one.outgoing()))
    whole = whole or sender.outgoing()
    body = whole[9:] if whole[0] & 2 else whole[2:]
    name, data = body[1 : 1 + body[0]], body[1 + body[0] :]
    assert name == step.encode()
    altered = {
        "cut": command(named(name, data[:-1])),
        "long": command(named(name, data + b"\0")),
        "bit": command(named(name, data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])),
        "again": whole + whole,
        "renamed": command(named(b"SOMETHING", data)),
    }
    with pytest.raises(ZmtpError) as caught:
        list(receiver.receive(altered[change]))
        # Once it is ready, what was a handshake's is no MESSAGE.
    assert caught.value.kind == ("other_key" if (step, change) == ("HELLO", "bit") else "protocol")
    assert not receiver.ready


@pytest.mark.parametrize("skipped", ["HELLO", "INITIATE"])
def test_a_command_before_its_turn_is_refused(skipped: str) -> None:
    one, other = client(), server()
    sent = handshake(one, other)
    late = server()
    list(late.receive(sent[1][:BYTES]))
    data = sent[3] if skipped == "HELLO" else header(0, SEALED_BYTES) + b"\7MESSAGE" + bytes(SEALED_BYTES - 8)
    assert refused(late, data).kind == "protocol"


def test_a_recorded_handshake_does_not_work_twice() -> None:
    sent = handshake(client(), server())
    late = server()
    list(late.receive(sent[1]))
    assert "another cookie" in refused(late, sent[3]).message


def test_a_key_of_zeros_is_refused() -> None:
    start = client().start()
    body = start[BYTES + 2 :]
    zeros = body[: 6 + 74] + bytes(32) + body[6 + 74 + 32 :]
    assert "keep nothing secret" in refused(server(), start[:BYTES] + command(zeros)).message


def test_another_version_of_curve_is_named() -> None:
    start = client().start()
    body = start[BYTES + 2 :]
    assert (
        "HELLO is of version 2.0"
        in refused(server(), start[:BYTES] + command(body[:6] + b"\2" + body[7:])).message
    )


def test_messages_arrive_sealed() -> None:
    one, other = pair()
    for body in (b"", b"a", b"b" * 1000):
        sent = b"".join(one.message(body))
        assert b"bbbb" not in sent
        assert list(other.receive(sent)) == [Received(body, 1, len(body))]
        assert list(one.receive(b"".join(other.message(body)))) == [Received(body, 1, len(body))]
    assert list(other.receive(b"".join(one.message(b"a", b"bc", b"")))) == [Received(b"", 3, 3)]
    assert list(other.receive(one._control(named(b"PING", bytes(2))))) == []
    assert list(one.receive(other.outgoing())) == []


def test_what_ends_the_handshake_goes_before_the_first_message() -> None:
    one, other = client(), server()
    list(other.receive(one.start()))
    list(one.receive(other.start() + other.outgoing()))
    list(other.receive(one.outgoing()))
    assert list(one.receive(b"".join(other.message(b"at once"))))[1] == Received(b"at once", 1, 7)


@pytest.mark.parametrize(
    "how", ["again", "swapped", "changed", "cut", "back", "plain", "plain command", "more"]
)
def test_a_sealed_message_that_is_not_as_it_should_be_is_refused(how: str) -> None:
    one, other = pair()
    first, second = b"".join(one.message(b"first")), b"".join(one.message(b"second"))
    data = {
        "again": first + first,
        "swapped": second + first,
        "changed": first[:-1] + bytes([first[-1] ^ 1]),
        "cut": header(0, SEALED_BYTES - 1) + first[2:][: SEALED_BYTES - 1],
        "back": b"".join(other.message(b"to its sender")),
        "plain": header(0, 5) + b"first",
        "plain command": command(named(b"PING", b"\0\0")),
        "more": bytes([MORE]) + first[1:],
    }[how]
    assert refused(other, data).kind == "protocol"


def test_a_gap_in_the_numbers_does_no_harm() -> None:
    one, other = pair()
    one.message(b"never sent")
    assert list(other.receive(b"".join(one.message(b"sent")))) == [Received(b"sent", 1, 4)]


Flags = Literal[3, 4, 0xFF]


@pytest.mark.parametrize("flags", [3, 4, 0xFF])
def test_flags_in_a_box_are_few(flags: Flags) -> None:
    one, other = pair()
    assert one._boxes is not None
    sealed = b"".join(one._boxes.seal(flags, b"x"))
    assert "is no frame's flags" in refused(other, header(0, len(sealed)) + sealed).message


def test_a_frame_that_is_marked_as_a_command_outside_is_opened_too() -> None:
    one, other = pair()
    assert one._boxes is not None
    sealed = b"".join(one._boxes.seal(0, b"x"))
    assert list(other.receive(header(COMMAND, len(sealed)) + sealed)) == [Received(b"x", 1, 1)]


def test_sealed_messages_have_the_same_limits() -> None:
    one, other = pair()
    error = refused(other, header(0, (1 << 64) - 1))
    assert error.kind == "too_large"
    one, other = pair()
    error = refused(other, b"".join(one.message(bytes(1001))))
    assert (error.kind, error.message) == ("too_large", "a message has 1001 bytes, the limit is 1000")
    one, other = pair()
    error = refused(other, b"".join(one.message(bytes(600), bytes(401))))
    assert (error.kind, error.message) == ("too_large", "a message has 1001 bytes, the limit is 1000")
    one, other = pair()
    assert refused(other, b"".join(one.message(*[b""] * (MOST_FRAMES + 1)))).kind == "too_large"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_large_box_is_told_of_before_it_is_opened(elsewhere: bool) -> None:
    one, other = pair_for(2 * LARGE_BOX)
    large = bytes(LARGE_BOX)
    events = other.receive(b"".join(one.message(large) + one.message(b"small")))
    box = next(events)
    assert isinstance(box, LargeBox)
    list(one.receive(b"".join(other.message(b"meanwhile"))))
    if elsewhere:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(box.open).result()
    assert list(events) == [Received(large, 1, len(large)), Received(b"small", 1, 5)]


def test_a_large_box_that_was_changed_ends_the_connection_and_not_the_thread_that_opens_it() -> None:
    one, other = pair_for(2 * LARGE_BOX)
    sent = bytearray(b"".join(one.message(bytes(LARGE_BOX))))
    sent[-1] ^= 1
    events = other.receive(sent)
    box = next(events)
    assert isinstance(box, LargeBox)
    box.open()
    with pytest.raises(ZmtpError, match="cannot be opened"):
        next(events)
    assert not other.ready
