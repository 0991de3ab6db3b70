"""Binds the daemon's sockets: local ROUTER, events PUB, peer ROUTER."""

from __future__ import annotations

from pathlib import Path

import zmq
import zmq.asyncio

from kvd.addresses import join_address
from kvd.service.config import Config, endpoint
from kvd.service.errors import StartError
from kvd.service.sockets import curve
from kvd.service.sockets.curve import Keys
from kvd.wire.names import events_address, socket_address

ZAP_DOMAIN = "kvd"
HANDSHAKE_MS = 3000
"""How long a connection may stay silent before it has said that it speaks ZMTP."""
BACKLOG = 1024


def bind_local(context: zmq.asyncio.Context, config: Config, directory: Path) -> zmq.Socket[bytes]:
    """The ROUTER for workers and operators, a plain socket (`Router.run`). Raises `StartError`."""
    socket = _plain(context, zmq.ROUTER, config.local.max_message_bytes, config.local.queue)
    return _bound(socket, socket_address(directory))


def bind_events(context: zmq.asyncio.Context, directory: Path) -> zmq.Socket[bytes]:
    """The PUB for events; a plain socket, since sending on it never waits. Raises `StartError`."""
    return _bound(_plain(context, zmq.PUB, 1 << 20, 10_000), events_address(directory))


def bind_peer(
    context: zmq.asyncio.Context, config: Config, keys: Keys | None
) -> tuple[zmq.Socket[bytes], tuple[str, int]]:
    """The ROUTER for other kvds, plain too, and the host and port it listens on.

    Raises `StartError` and `ConfigError`.
    """
    host, port = endpoint(config.peer.listen, "peer.listen")
    curve.refuse_open_bind(host, keys)
    socket = _plain(context, zmq.ROUTER, config.peer.max_message_bytes, config.peer.queue)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(config.peer.ping_seconds * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(config.peer.down_seconds * 1000))
    socket.setsockopt(zmq.IPV6, int(":" in host))
    if keys is not None:
        socket.zap_domain = ZAP_DOMAIN.encode()
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    _bound(socket, f"tcp://{join_address(host, port or '*')}")
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return socket, (host, int(bound.rpartition(":")[2]))


def _plain(context: zmq.asyncio.Context, kind: int, message_bytes: int, queue: int) -> zmq.Socket[bytes]:
    plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
    socket = plain.socket(kind)
    options = {
        zmq.LINGER: 0,
        zmq.MAXMSGSIZE: message_bytes,
        zmq.SNDHWM: queue,
        zmq.RCVHWM: queue,
        zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
        zmq.HEARTBEAT_IVL: 2000,
        zmq.HEARTBEAT_TIMEOUT: 10_000,
        zmq.BACKLOG: BACKLOG,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)
    return socket


def _bound(socket: zmq.Socket[bytes], address: str) -> zmq.Socket[bytes]:
    """The socket at its address; one of a file is for kvd's user and group."""
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        hint = "see who has it: `ss -xlp`, `ss -tlp`"
        raise StartError(f"cannot listen on {address}: {error.strerror}", hint=hint) from None
    if address.startswith("ipc://"):
        Path(address.removeprefix("ipc://")).chmod(0o660)
    return socket
