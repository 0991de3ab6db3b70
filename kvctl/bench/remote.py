"""The source process on another host: the same commands as of a process here, through `kvctl serve` over ZMQ."""

from __future__ import annotations

import json
import socket as sockets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from kvctl.errors import PeerTimeout, UsageError
from kvctl.processes.errors import WorkerFailed
from kvctl.processes.worker_process import good
from kvd.addresses import split_address
from kvd.keys import KeyFileError, KeyPair, read_pair

PORT = 5690
PROTOCOL = 1
"""Of the commands; both sides must have the same."""
HELLO_SECONDS = 5.0
MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True)
class ServeTarget:
    """Where `kvctl serve` answers. ``keys`` are those of both sides, None where none are needed."""

    host: str
    port: int
    keys: KeyPair | None = None

    @property
    def name(self) -> str:
        """As it stands on the screen."""
        return f"{self.host}:{self.port}"

    def own_address(self) -> str:
        """The address from which this host reaches the other. Raises `PeerTimeout`."""
        try:
            with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
                probe.connect((self.host, self.port))
                found: str = probe.getsockname()[0]
                return found
        except OSError as error:
            raise PeerTimeout(
                f"no way to {self.host}: {error.strerror or error}",
                "name a host that this one has a route to",
            ) from None


def target(text: str | None, key_file: Path | None) -> ServeTarget | None:
    """What ``--to HOST[:PORT]`` and ``--key-file`` say. Raises `UsageError`."""
    return ServeTarget(*endpoint(text), keys(key_file)) if text is not None else None


def endpoint(text: str) -> tuple[str, int]:
    """Host and port of ``HOST[:PORT]``. Raises `UsageError`."""
    try:
        host, port = split_address(text if ":" in text else f"{text}:{PORT}")
    except ValueError:
        host, port = "", 0
    if not host or ":" in host:
        raise UsageError(f"{text!r} is no HOST[:PORT]; write 10.0.0.2 or 10.0.0.2:{PORT}")
    return host, port


def keys(path: Path | None) -> KeyPair | None:
    """The pair of a file. Raises `UsageError`."""
    try:
        return read_pair(path) if path is not None else None
    except KeyFileError as error:
        raise UsageError(error.message, error.hint) from None


@dataclass(slots=True)
class RemoteProcess:
    """The source on the other host; the same methods as of a `WorkerProcess`. For one thread."""

    name: str
    address: str
    socket: zmq.Socket[bytes]
    ucx_log: Path

    def ask(self, *, patience: float = 60.0, **command: Any) -> dict[str, Any]:
        """Give a command and wait ``patience`` seconds for its answer. Raises `WorkerFailed`."""
        self.give(command)
        return good(self.name, self.answer(patience))

    def give(self, command: dict[str, Any]) -> None:
        """Send a command; `answer` has its answer."""
        self.socket.send(json.dumps(command).encode())

    def answer(self, timeout: float) -> dict[str, Any]:
        """The next answer, at most ``timeout`` seconds from now. Raises `WorkerFailed`."""
        if not self.socket.poll(int(timeout * 1000)):
            raise WorkerFailed(f"{self.name} at {self.address} did not answer within {timeout:g} s")
        found: dict[str, Any] = json.loads(self.socket.recv())
        return found

    def dismiss(self) -> None:
        """Have it end; what UCX said there is then in ``ucx_log``."""
        self.give({"do": "end"})

    def end(self, timeout: float) -> None:
        """Wait for that at most ``timeout`` seconds, and hang up."""
        until = time.monotonic() + timeout
        while self.socket.poll(int(max(0.0, until - time.monotonic()) * 1000)):
            # An answer that nobody waited for any more comes before that of the end.
            answer = json.loads(self.socket.recv())
            if "log" in answer:
                self.ucx_log.write_text(answer["log"], encoding="utf-8")
                break
        self.socket.close(linger=0)


def connect(to: ServeTarget, backend: str, log: Path) -> RemoteProcess:
    """Greet `kvctl serve`. Raises `PeerTimeout` where it does not answer, `WorkerFailed` where it refuses."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 500
    socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
    if to.keys is not None:
        socket.curve_serverkey = to.keys.public
        socket.curve_publickey, socket.curve_secretkey = to.keys.public, to.keys.secret
    socket.connect(f"tcp://{to.host}:{to.port}")
    process = RemoteProcess(f"the source with {backend}", to.name, socket, log)
    process.give({"do": "hello", "protocol": PROTOCOL})
    if not socket.poll(int(HELLO_SECONDS * 1000)):
        socket.close(linger=0)
        keyed = "the same --key-file there" if to.keys else "--key-file, if it has one"
        raise PeerTimeout(
            f"nothing answers at {to.name} within {HELLO_SECONDS:g} s",
            f"run `kvctl serve {to.name}` on that host, and give {keyed}",
        )
    answer = json.loads(socket.recv())
    if "error" in answer:
        socket.close(linger=0)
        raise WorkerFailed(f"kvctl serve at {to.name}: {answer['error']}")
    return process


def begin(process: RemoteProcess, who: dict[str, Any], environment: dict[str, str]) -> None:
    """Have the other host start the source; its first answer is that of a process here."""
    process.give({"do": "begin", "who": who, "environment": environment})
