"""One well-formed question, an answer bounded in time and bytes."""

from __future__ import annotations

import socket
import time

import msgspec
import pytest

from kvctl.errors import KvctlError
from kvctl.stock import bounded
from kvctl.stock.side_channel import ask
from kvd.zmtp import greeting
from kvd.zmtp.frames import buffers, command, metadata, named
from tests.support.stock_listeners import nixl_listener, saying

HELLO = greeting.greeting("NULL", as_server=False) + command(named(b"READY", metadata(Socket_Type=b"ROUTER")))


def test_a_rank_is_asked_for_as_stock_readers_do_and_the_listener_serves_on() -> None:
    with nixl_listener({(0, 0): b"of rank 0", (0, 1): b"of rank 1"}) as listener:
        answers = [ask("127.0.0.1", listener.port, tp=tp) for tp in (0, 1, 0)]
        assert [answer.payload for answer in answers] == [b"of rank 0", b"of rank 1", b"of rank 0"]
        assert answers[0].clock == 1.5
        assert listener.asked == [(0, 0), (0, 1), (0, 0)]
        assert listener.alive


def test_the_listener_of_the_tests_dies_as_a_stock_one_does() -> None:
    with nixl_listener({(0, 0): b"of rank 0"}) as listener:
        with pytest.raises(KvctlError):
            ask("127.0.0.1", listener.port, tp=1, seconds=1)
        assert not listener.alive


def test_a_large_answer_arrives_whole() -> None:
    payload = bytes(range(256)) * 8192
    with nixl_listener({(0, 0): payload}) as listener:
        assert ask("127.0.0.1", listener.port).payload == payload


def test_nobody_there_names_what_it_may_be() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(bounded.StockUnreachable, match=f"127.0.0.1:{port}: Connection refused") as caught:
        ask("127.0.0.1", port)
    assert (caught.value.code, caught.value.exit_code) == ("KVD-STOCK-UNREACHABLE", 4)
    assert "LISTENER_DEAD" in caught.value.hint


@pytest.mark.parametrize("said", [b"", b"\xff", HELLO, HELLO + b"\x01\x00", HELLO[:70]])
def test_silence_at_any_moment_ends_in_time(said: bytes) -> None:
    began = time.monotonic()
    with saying(said, hold=True) as port, pytest.raises(bounded.StockSilent) as caught:
        ask("127.0.0.1", port, seconds=0.2)
    assert caught.value.code == "KVD-STOCK-SILENT"
    assert time.monotonic() - began < 5.0


def test_a_trickle_ends_in_time_too() -> None:
    began = time.monotonic()
    with saying(*[b"\xff"] * 1000, hold=True, every=0.02) as port, pytest.raises(bounded.StockSilent):
        ask("127.0.0.1", port, seconds=0.2)
    assert time.monotonic() - began < 5.0  # of 20


@pytest.mark.parametrize(
    ("said", "names"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n" * 4, "does not speak ZMTP 3"),
        (HELLO[:64], "ends the connection after 0 of 1 bytes"),
        (HELLO + b"\x02" + (1 << 40).to_bytes(8, "big"), "sends 1099511627776 bytes where at most"),
        (HELLO + b"\xf0\x00", "flags 0xf0"),
        (HELLO + b"\x01\x00" * 9, "more than 8 frames"),
        (HELLO + b"\x04\x00" * 65, "commands where the other is due"),
        (HELLO + b"".join(buffers(b"x")), "frames of 1 bytes"),
        (HELLO + b"".join(buffers(b"x", b"payload")), "frames of 1, 7 bytes"),
        (HELLO[:64] + command(named(b"ERROR", b"\x03no!")), "answers with b'ERROR' where READY is due"),
    ],
)
def test_garbage_is_named(said: bytes, names: str) -> None:
    with saying(said) as port, pytest.raises(KvctlError, match=names) as caught:
        ask("127.0.0.1", port, seconds=1)
    assert caught.value.code == "KVD-STOCK-GARBAGE"
    assert f"127.0.0.1:{port}" in caught.value.message


def test_a_clock_that_is_none_does_no_harm() -> None:
    for frame, clock in ((msgspec.msgpack.encode("late"), None), (msgspec.msgpack.encode(2.5), 2.5)):
        with saying(HELLO + b"".join(buffers(b"", b"payload", frame)), hold=True) as port:
            assert ask("127.0.0.1", port, seconds=1).clock == clock
