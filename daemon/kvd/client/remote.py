"""The operator's side, from another host: questions to a kvd's peer socket, with a key, by a deadline."""

from __future__ import annotations

import itertools
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

import msgspec

from kvd.addresses import join_address
from kvd.client.dialling import NotResolved, dialled
from kvd.client.errors import (
    AnswerTooLarge,
    ClientError,
    KeyNotTrusted,
    ProtocolError,
    RefusedByDaemon,
    TimedOut,
    Unreachable,
)
from kvd.shown import brief
from kvd.wire.errors import WireError
from kvd.wire.frame import Message, decode, encode
from kvd.wire.limits import LARGEST, MIB
from kvd.wire.query import ListEngines
from kvd.wire.reply import Refused
from kvd.wire.transfer import GetKeptEngine
from kvd.zmtp.connection import Connection, ConnectionLimits
from kvd.zmtp.curve import CurveClient
from kvd.zmtp.errors import ZmtpError
from kvd.zmtp.events import Handshaken, Received, ZmtpEvent
from kvd.zmtp.null import Null

READ_BYTES = 64 << 10
LISTED_BYTES = 8 * MIB
"""Of one answer without cards: a page of kvd's ends with the row that makes it more than 4 MiB."""
ANSWERED_BYTES = 32 * MIB
"""Of all answers on a connection, where no cards were asked for: 10,000 engines of 64 workers have half of it."""
ANSWERED_BYTES_WITH_CARDS = 128 * MIB
_CODE = re.compile(r"[A-Z][A-Z0-9_-]{1,39}")


@dataclass(frozen=True, slots=True)
class RemoteKvd:
    """A kvd's peer socket, the public key that it must have, and the pair to speak with, all in Z85.

    Without ``server`` there are no keys, which a kvd takes on loopback only.
    """

    host: str
    port: int
    server: bytes = b""
    public: bytes = b""
    secret: bytes = field(default=b"", repr=False)

    @property
    def place(self) -> str:
        """``host:port``."""
        return join_address(self.host, self.port)


class RemoteOperator:
    """A connection to one kvd's peer socket, for one thread. Close it, or use it in a ``with``.

    ``timeout`` is in seconds and holds for connecting and for each `ask`; all of them are over at ``deadline``, in
    monotonic seconds. The other host may be hostile: what it sends has limits, one by one and in all. Raises as `ask`
    does.
    """

    def __init__(self, kvd: RemoteKvd, timeout: float, deadline: float | None = None) -> None:
        self.kvd, self.timeout = kvd, timeout
        self._deadline = deadline
        self._ids = itertools.count(1)
        mechanism = CurveClient(kvd.secret, kvd.server) if kvd.server else Null()
        self._zmtp = Connection("DEALER", mechanism, ConnectionLimits(message=LARGEST))
        self._events: Iterator[ZmtpEvent] = iter(())
        self._received, self._most = 0, ANSWERED_BYTES
        until = self._until(timeout)
        self._socket = self._connected(until)
        try:
            self._shake_hands(until)
        except ClientError:
            self._socket.close()
            raise

    def ask(self, message: Message, timeout: float | None = None) -> Message:
        """Send ``message`` and wait for its answer, at most ``timeout`` seconds.

        Raises `Unreachable` (also where the connection is lost), `KeyNotTrusted`, `TimedOut`, `RefusedByDaemon`,
        `AnswerTooLarge` and `ProtocolError`.
        """
        with_cards = isinstance(message, GetKeptEngine) or (
            isinstance(message, ListEngines) and message.cards
        )
        if with_cards:
            self._most = ANSWERED_BYTES_WITH_CARDS
        until = self._until(self.timeout if timeout is None else timeout)
        correlation = next(self._ids)
        for buffer in self._zmtp.message(encode(message, correlation)):
            self._send(buffer, until)
        while True:
            event = self._next(until)
            if not isinstance(event, Received):
                continue
            self._check_size(len(event.body), LARGEST if with_cards else LISTED_BYTES)
            try:
                answer, of = decode(event.body)
            except WireError as error:
                raise ProtocolError(
                    f"the answer of the kvd at {self.kvd.place} cannot be read: {error.message}",
                    hint="kvctl and kvd should be of one version",
                ) from None
            if of not in (correlation, 0):
                continue  # the answer to a question that was given up before
            if isinstance(answer, Refused):
                raise self._refused(answer)
            if of == correlation:
                return answer

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _until(self, timeout: float) -> float:
        until = time.monotonic() + timeout
        return until if self._deadline is None else min(until, self._deadline)

    def _connected(self, until: float) -> socket.socket:
        kvd = self.kvd
        try:
            made = dialled(kvd.host, kvd.port, until)
        except TimeoutError:
            raise self._late("connect") from None
        except NotResolved as error:
            raise Unreachable(
                f"no kvd at {kvd.place}: {error}",
                hint="give its address, or a name that `getent hosts` knows here",
            ) from None
        except OSError as error:
            raise Unreachable(
                f"no kvd at {kvd.place}: {_told(error)}",
                hint=f"does kvd run there, and may this host reach {kvd.place}?",
            ) from None
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def _shake_hands(self, until: float) -> None:
        self._send(self._zmtp.start(), until)
        while not isinstance(self._next(until), Handshaken):
            pass
        self._send(self._zmtp.outgoing(), until)

    def _send(self, data: bytes, until: float) -> None:
        if not data:
            return
        self._socket.settimeout(self._left(until))
        try:
            self._socket.sendall(data)
        except TimeoutError:
            raise self._late("take a question") from None
        except OSError:  # reading tells why
            return

    def _next(self, until: float) -> ZmtpEvent:
        """What comes next. Raises `ClientError` where the connection ends, or nothing comes in time."""
        while True:
            try:
                event = next(self._events, None)
            except ZmtpError as error:
                raise self._broken(error) from None
            if event is not None:
                return event
            self._send(self._zmtp.outgoing(), until)
            self._socket.settimeout(self._left(until))
            try:
                data = self._socket.recv(max(READ_BYTES, min(self._zmtp.wanted, LARGEST)))
            except TimeoutError:
                raise self._late("answer") from None
            except OSError as error:
                raise self._ended(_told(error)) from None
            if not data:
                raise self._ended("it closed the connection")
            self._received += len(data)
            self._check_size(self._received, self._most)
            self._events = self._zmtp.receive(data)

    def _check_size(self, size: int, most: int) -> None:
        if size > most:
            raise AnswerTooLarge(
                f"the kvd at {self.kvd.place} sent {size:,} bytes for an answer; at most {most:,} are taken",
                hint=f"look at that host: a kvd that is well answers with less; type it on {self.kvd.host}",
            )

    def _refused(self, refusal: Refused) -> ClientError:
        """The refusal with who sent it. What is said there goes to a person's terminal, so it is kept short."""
        if not _CODE.fullmatch(refusal.code):
            return ProtocolError(
                f"the kvd at {self.kvd.place} refused with {brief(refusal.code)!r}, which is no code",
                hint="look at that host: is it a kvd of this version?",
            )
        short = msgspec.structs.replace(
            refusal, message=brief(refusal.message), hint=brief(refusal.hint), factors=refusal.factors[:64]
        )
        return RefusedByDaemon(short, f"the kvd at {self.kvd.place}")

    def _left(self, until: float) -> float:
        left = until - time.monotonic()
        if left <= 0:
            raise self._late("answer")
        return left

    def _late(self, what: str) -> TimedOut:
        return TimedOut(
            f"the kvd at {self.kvd.place} did not {what} in time",
            hint="it may be stopped, overloaded, or behind a network that drops packets: see `systemctl status kvd`"
            " there, or give more --timeout",
        )

    def _ended(self, why: str) -> ClientError:
        if not self._zmtp.ready and self.kvd.server:
            return KeyNotTrusted(
                f"the kvd at {self.kvd.place} ended the handshake: it may have another key than"
                f" {self.kvd.server.decode()}, which is expected here",
                hint="`kvctl keys show` there prints its key; if it is another:"
                f" kvctl keys trust 'KEY' {self.kvd.place} --replace",
            )
        return Unreachable(f"the connection to the kvd at {self.kvd.place} was lost: {why}", hint="try again")

    def _broken(self, error: ZmtpError) -> ClientError:
        if error.kind == "not_authorised":
            return KeyNotTrusted(
                f"the kvd at {self.kvd.place} does not let the key {self.kvd.public.decode()} in",
                hint=f"there, type: kvctl keys trust '{self.kvd.public.decode()}' HOST:PORT, with this host's address",
            )
        return ProtocolError(
            f"the kvd at {self.kvd.place}: {error.message}",
            hint="is that the address of a kvd's peer socket (peer.advertise), and are keys set on both sides?",
        )


def _told(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
