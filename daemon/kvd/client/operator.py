"""The operator's side: a small blocking client for one question at a time, and the stream of events."""

from __future__ import annotations

import itertools
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import msgspec
import zmq

from kvd.client.errors import ProtocolError, RefusedByDaemon, SocketNotPermitted, TimedOut, Unreachable
from kvd.wire.errors import WireError
from kvd.wire.event import KvdEvent
from kvd.wire.frame import Message, decode, encode
from kvd.wire.limits import LARGEST
from kvd.wire.names import EVENTS_NAME, SOCKET_NAME, events_address, runtime_dir, socket_address
from kvd.wire.reply import Refused

PROBE_SECONDS = 2.0
"""How long the system may take to say whether anybody listens on a socket."""
START_HINT = (
    "see `systemctl status kvd`; one in another directory is named by --runtime-dir; on a host without one `kvd init`"
    " makes what it needs and says how to start it"
)

_EVENT = msgspec.msgpack.Decoder(KvdEvent)


class Operator:
    """A connection to one kvd. Not for use from several threads at once. Close it, or use it in a ``with``.

    ``timeout`` is in seconds and holds for each `ask`.
    """

    def __init__(self, directory: Path, timeout: float) -> None:
        self.directory = directory
        self.timeout = timeout
        self._context = zmq.Context()
        self._socket = _socket(self._context, zmq.DEALER)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED)
        self._socket.connect(socket_address(directory))
        self._ids = itertools.count(1)

    def check_connected(self) -> None:
        """Raise `Unreachable`, with the cause, where the first attempt to connect fails."""
        # A probe of its own would leave a connection without a handshake in kvd's counters, each time.
        tried = self._monitor.poll(int(1000 * PROBE_SECONDS))
        if (
            not tried
            or int.from_bytes(self._monitor.recv_multipart()[0][:2], sys.byteorder) != zmq.EVENT_CONNECTED
        ):
            check_listening(self.directory / SOCKET_NAME)

    def ask(self, message: Message, timeout: float | None = None) -> Message:
        """Send ``message`` and wait for its answer, at most ``timeout`` seconds.

        Raises `Unreachable` (nobody listens), `TimedOut`, `RefusedByDaemon` and `ProtocolError`.
        """
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        correlation = next(self._ids)
        self._socket.send(encode(message, correlation))
        while (left := deadline - time.monotonic()) > 0 and self._socket.poll(max(1, int(left * 1000))):
            answer, of = _decode(self._socket.recv())
            if of not in (correlation, 0):
                continue  # the answer to a question that was given up before
            if isinstance(answer, Refused):
                raise RefusedByDaemon(answer)
            if of == correlation:
                return answer
        check_listening(self.directory / SOCKET_NAME)
        raise TimedOut(
            f"kvd at {self.directory / SOCKET_NAME} did not answer within {limit:g} s",
            hint="it may be stopped or overloaded: see `systemctl status kvd`, or give more --timeout",
        )

    def events(
        self,
        kinds: tuple[str, ...] = (),
        timeout: float | None = None,
        connected: Callable[[bool], None] | None = None,
    ) -> Iterator[KvdEvent]:
        """Events as kvd publishes them, of the given kinds (prefixes such as ``lease.``), or all.

        Ends when no event came for ``timeout`` seconds; None waits for ever. The subscription stands when this
        returns an iterator; the first events of a connection may be missed while it is being made. A kvd that goes
        away does not end it, since another may take its place: ``connected`` is called with False when the connection
        is lost and with True when there is one (again). Raises `Unreachable` at once where nobody listens,
        `ProtocolError` for what is no event.
        """
        check_listening(self.directory / EVENTS_NAME)
        subscriber = _socket(self._context, zmq.SUB)
        monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        # After the monitor, which must see this connection made.
        subscriber.connect(events_address(self.directory))
        for kind in kinds or ("",):
            subscriber.subscribe(kind)
        return _events(subscriber, monitor, timeout, connected or (lambda _: None))

    def close(self) -> None:
        """Close all sockets. Idempotent; loses nothing but answers that nobody waits for."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(where: str | Path | None = None, timeout: float = 5.0) -> Operator:
    """A connection to the kvd of a runtime directory (or of an ``ipc://`` address of its socket).

    None takes ``$KVD_RUNTIME_DIR`` or the default place. Raises `Unreachable` at once where nobody listens.
    """
    text = None if where is None else str(where).removeprefix("ipc://")
    directory = runtime_dir(text)
    if directory.name == SOCKET_NAME:
        directory = directory.parent
    operator = Operator(directory, timeout)
    try:
        operator.check_connected()
    except Unreachable:
        operator.close()
        raise
    return operator


def check_listening(path: Path) -> None:
    """Raise `Unreachable`, with the cause, unless a process accepts connections on the Unix socket ``path``."""
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise Unreachable(f"{path} is no socket", hint="give the runtime directory of a kvd")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(PROBE_SECONDS)
            probe.connect(str(path))
    except FileNotFoundError:
        raise Unreachable(f"no kvd here: {path} does not exist", hint=START_HINT) from None
    except ConnectionRefusedError:
        raise Unreachable(
            f"no kvd behind {path}: its socket was left behind by one that died", hint=START_HINT
        ) from None
    except PermissionError:
        raise SocketNotPermitted(
            f"not permitted to use {path}",
            hint="be root, or a member of the group that owns the runtime directory",
        ) from None
    except OSError as error:
        raise Unreachable(f"cannot connect to {path}: {error.strerror or error}", hint=START_HINT) from None


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    opened = context.socket(kind)
    opened.setsockopt(zmq.LINGER, 0)
    opened.setsockopt(zmq.MAXMSGSIZE, LARGEST)
    opened.setsockopt(zmq.RECONNECT_IVL, 50)
    opened.setsockopt(zmq.RECONNECT_IVL_MAX, 100)
    return opened


def _decode(frame: bytes) -> tuple[Message, int]:
    try:
        return decode(frame)
    except WireError as error:
        raise ProtocolError(
            f"kvd's answer cannot be read: {error.message}", hint="kvctl and kvd should be of one version"
        ) from None


def _events(
    subscriber: zmq.Socket[bytes],
    monitor: zmq.Socket[bytes],
    timeout: float | None,
    connected: Callable[[bool], None],
) -> Iterator[KvdEvent]:
    # It brings asyncio with it, which takes longer to import than all else that a question needs.
    from zmq.utils.monitor import parse_monitor_message

    poller = zmq.Poller()
    poller.register(subscriber, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    last_event = time.monotonic()
    with subscriber, monitor:
        while True:
            left = None if timeout is None else last_event + timeout - time.monotonic()
            if left is not None and left <= 0:
                return
            ready = dict(poller.poll(None if left is None else max(1, int(left * 1000))))
            # Events that came before the connection was lost are still there and come first.
            if subscriber in ready:
                last_event = time.monotonic()
                yield _event(subscriber.recv_multipart()[-1])
            elif monitor in ready:
                change = parse_monitor_message(monitor.recv_multipart())["event"]
                connected(change == zmq.EVENT_HANDSHAKE_SUCCEEDED)


def _event(frame: bytes) -> KvdEvent:
    try:
        return _EVENT.decode(frame)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"what kvd published is no event: {error}") from None
