"""The side channel of a stock NixlConnector: one well-formed question, one answer.

The listener is a ROUTER socket whose thread ends for good at the first message that is not
``(b"get_meta_msg", pipeline rank, tensor rank)`` of a rank that it has. So nothing else is ever sent here, and nothing
but rank (0, 0), which every engine has, unless the caller has proof of the rank. An answer has two or three frames;
`kvd.zmtp` keeps the first alone, so they are read here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from kvctl.stock.bounded import Line, StockGarbage, connected
from kvd.zmtp import greeting
from kvd.zmtp.errors import ZmtpError
from kvd.zmtp.frames import COMMAND, LONG, MORE, buffers, command, metadata, named, taken_apart

QUESTION = b"get_meta_msg"
SECONDS = 5.0
"""How long a stock decoder waits for an answer."""
_FRAMES = 8
_PIECES = 64


@dataclass(frozen=True, slots=True)
class SideChannelAnswer:
    """What a listener answered: the payload, undecoded; its clock from vLLM 0.26 on; how long all of it took."""

    payload: bytes
    clock: float | None
    seconds: float


def ask(host: str, port: int, *, pp: int = 0, tp: int = 0, seconds: float = SECONDS) -> SideChannelAnswer:
    """Ask for the metadata of one rank. A rank other than (0, 0) must be known to exist: else it ends the listener.

    Raises `StockUnreachable`, `StockSilent` and `StockGarbage`.
    """
    began = time.perf_counter()
    with connected(host, port, seconds) as line:
        try:
            ready = command(named(b"READY", metadata(Socket_Type=b"REQ", Identity=b"")))
            line.write(greeting.greeting("NULL", as_server=False) + ready)
            greeting.check(line.read(greeting.BYTES), "NULL")
            name, _ = taken_apart(_piece(line, command=True)[1])
            if name != b"READY":
                raise StockGarbage(f"{line.where} answers with {name[:16]!r} where READY is due")
            line.write(b"".join(buffers(b"", msgspec.msgpack.encode((QUESTION, pp, tp)))))
            frames = _message(line)
        except ZmtpError as error:
            raise StockGarbage(
                f"{line.where} is no side channel of NixlConnector: {error.message}",
                "is that the port of the engine's API? The side channel's is VLLM_NIXL_SIDE_CHANNEL_PORT (5600)",
            ) from None
    if len(frames) not in (2, 3) or frames[0]:
        raise StockGarbage(
            f"{line.where} answers with frames of {', '.join(str(len(f)) for f in frames)} bytes, where an empty one,"
            " the metadata and a clock are due"
        )
    return SideChannelAnswer(frames[1], _clock(frames), time.perf_counter() - began)


def _message(line: Line) -> list[bytes]:
    frames = []
    while True:
        flags, body = _piece(line, command=False)
        frames.append(body)
        if not flags & MORE:
            return frames
        if len(frames) == _FRAMES:
            raise StockGarbage(f"{line.where} answers with more than {_FRAMES} frames")


def _piece(line: Line, *, command: bool) -> tuple[int, bytes]:
    """The next command, or the next frame of a message; commands before a message are read and passed over."""
    for _ in range(_PIECES):
        flags = line.read(1)[0]
        if flags & ~(MORE | LONG | COMMAND):
            raise StockGarbage(
                f"{line.where} sends a frame with the flags {flags:#04x}, which ZMTP does not know"
            )
        size = int.from_bytes(line.read(8 if flags & LONG else 1), "big")
        body = line.read(size)
        if bool(flags & COMMAND) == command:
            return flags, body
        if command:
            break
    raise StockGarbage(f"{line.where} sends {'a message' if command else 'commands'} where the other is due")


def _clock(frames: list[bytes]) -> float | None:
    """The listener's clock; None where it sends none that is a number."""
    if len(frames) < 3:
        return None
    try:
        return msgspec.msgpack.decode(frames[2], type=float)
    except msgspec.DecodeError:
        return None
