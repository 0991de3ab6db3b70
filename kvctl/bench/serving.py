"""`kvctl serve`: gives memory of this host to a benchmark or replay of another, one at a time.

A relay: commands come over ZMQ and go to a process as it is started for a benchmark within one host; its answers go
back. The other side names the shape of the memory; how much there is of it, and of which device, is said here.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth.thread

from kvctl.bench import process as processes
from kvctl.bench.memory import size_of
from kvctl.bench.remote import MESSAGE_BYTES, PROTOCOL
from kvctl.cli.numbers import size
from kvctl.errors import RefusedError, UsageError
from kvctl.processes.commands import JsonCommand, JsonResult
from kvctl.processes.errors import WorkerFailed
from kvctl.processes.interruption import held
from kvctl.processes.worker_process import WorkerProcess
from kvd.addresses import is_loopback
from kvd.backends.registry import MEASURED
from kvd.geometry.codec import worker_from_plain
from kvd.keys import KeyPair

IDLE_SECONDS = 120.0
"""Without a command for so long, the other side is taken to be gone."""
ANSWER_SECONDS = 200.0
"""For one command; the other side has a limit of its own for each, which is shorter."""
LOG_BYTES = 1 << 20
ENVIRONMENT = frozenset(
    {"UCX_TLS", "UCX_NET_DEVICES", "UCX_RNDV_THRESH", "UCX_RNDV_SCHEME", "UCX_MAX_RNDV_RAILS"}
)
"""Variables that the other side may set for its source. Others could load libraries or write files here."""
DEAD = {"error": "the source has ended"}


@dataclass(frozen=True)
class Offer:
    """What is served: where, at most how many bytes at a time, of which CUDA device (None: host memory)."""

    host: str
    port: int
    memory: int
    device: int | None
    keys: KeyPair | None


@dataclass(slots=True)
class Session:
    """The other side that is being served, and its source."""

    identity: bytes
    source: WorkerProcess
    backend: str
    last_heard: float


@dataclass(slots=True)
class Serving:
    """What `_carry_out` works on."""

    offer: Offer
    folder: Path
    session: Session | None = None


def serve(offer: Offer, folder: Path) -> None:
    """Answer until interrupted. Raises `RefusedError` for an open bind, `UsageError` where the address is not ours."""
    with _bound(offer) as socket:
        port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        sys.stderr.write(f"serving up to {size(offer.memory)} on {offer.host}:{port}; Ctrl-C ends it\n")
        sys.stderr.flush()
        serving = Serving(offer, folder)
        try:
            while True:
                if socket.poll(1000):
                    identity, *frames = socket.recv_multipart()
                    answer = _answer(serving, identity, frames)
                    socket.send_multipart([identity, json.dumps(answer).encode()])
                elif serving.session and time.monotonic() - serving.session.last_heard > IDLE_SECONDS:
                    _end(serving)
        finally:
            _end(serving)


@contextlib.contextmanager
def _bound(offer: Offer) -> Iterator[zmq.Socket[bytes]]:
    if offer.keys is None and not is_loopback(offer.host):
        raise RefusedError(
            f"{offer.host} is not loopback and there is no --key-file: whoever reaches the port could take memory here",
            "`kvd --new-keys FILE` makes keys: put the file on both hosts and give --key-file FILE on both",
        )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    guard = zmq.auth.thread.ThreadAuthenticator(context)
    socket = context.socket(zmq.ROUTER)
    try:
        for option, value in {zmq.LINGER: 500, zmq.MAXMSGSIZE: MESSAGE_BYTES, zmq.RCVHWM: 16}.items():
            socket.setsockopt(option, value)
        if offer.keys is not None:
            guard.start()
            guard.configure_curve_callback("*", credentials_provider=_Holder(offer.keys.public))
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = offer.keys.public, offer.keys.secret
        try:
            socket.bind(f"tcp://{offer.host}:{offer.port or '*'}")
        except zmq.ZMQError as error:
            raise UsageError(
                f"cannot listen on {offer.host}:{offer.port}: {error.strerror}",
                "name an address of this host",
            ) from None
        yield socket
    finally:
        socket.close()
        if guard.is_alive():
            guard.stop()
        context.term()


@dataclass(frozen=True)
class _Holder:
    """Lets in who has the pair."""

    public: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        """Asked by pyzmq for each connection; ``key`` is in Z85."""
        del domain
        return key == self.public


def _answer(serving: Serving, identity: bytes, frames: list[bytes]) -> JsonResult:
    try:
        command = json.loads(frames[-1])
        if not isinstance(command, dict) or not isinstance(command.get("do"), str):
            return {"error": "a command is a JSON object that says what to do"}
        return _carry_out(serving, identity, command)
    except WorkerFailed as error:
        _end(serving)
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever it is, the other side gets it in words and this one goes on
        return {"error": f"{error}" or type(error).__name__}


def _carry_out(serving: Serving, identity: bytes, command: JsonCommand) -> JsonResult:
    do, session = command["do"], serving.session
    if session is not None and session.identity != identity:
        return {"error": "another benchmark is under way here; wait for its end"}
    if do == "hello":
        theirs = command.get("protocol")
        if theirs != PROTOCOL:
            return {"error": f"it speaks version {PROTOCOL} of these commands and kvctl here {theirs}"}
        return {"protocol": PROTOCOL, "memory": serving.offer.memory}
    if do == "begin":
        _end(serving)
        return _begin(serving, identity, command)
    if session is None:
        return {"log": ""} if do == "end" else DEAD
    session.last_heard = time.monotonic()
    if do == "end":
        return {"log": _end(serving)}
    if do == "listen":
        command["host"] = serving.offer.host
    session.source.give(command)
    return session.source.answer(ANSWER_SECONDS)


def _begin(serving: Serving, identity: bytes, command: JsonCommand) -> JsonResult:
    who, offer = command["who"], serving.offer
    backend, environment = who["backend"], command.get("environment", {})
    if backend not in MEASURED:
        return {"error": f"no backend {backend!r}; there are {', '.join(MEASURED)}"}
    if refused := sorted(set(environment) - ENVIRONMENT):
        return {
            "error": f"{', '.join(refused)} may not be set from elsewhere, only {', '.join(sorted(ENVIRONMENT))};"
            " set it for kvctl serve itself"
        }
    taken = sum(size_of(worker_from_plain(plain)) for plain in who["workers"].values())
    if taken > offer.memory:
        return {
            "error": f"it takes {size(taken)} of memory there, and kvctl serve gives {size(offer.memory)}"
        }
    options = processes.options_at(backend, offer.host)
    with held():
        source = processes.start("source", backend, serving.folder, environment)
        serving.session = Session(identity, source, backend, time.monotonic())
    source.give(processes.introduction("source", backend, options, who["workers"], offer.device))
    return source.answer(processes.START_SECONDS)


def _end(serving: Serving) -> str:
    """End the source, if there is one; what UCX said in it."""
    session, serving.session = serving.session, None
    if session is None:
        return ""
    session.source.dismiss()
    session.source.end(processes.END_SECONDS)
    log = processes.ucx_log("source", session.backend, serving.folder)
    said = log.read_text(encoding="utf-8", errors="replace")[-LOG_BYTES:] if log.exists() else ""
    log.unlink(missing_ok=True)
    return said
