"""Counts what happens to connections below the level of messages.

Whoever does not speak ZMTP, stays silent, or sends a frame that is larger than the limit loses its connection
inside libzmq, and no message ever tells. The socket's monitor does: every accepted connection ends as one of
the counted kinds.
"""

from __future__ import annotations

from collections import Counter
from functools import reduce
from operator import or_

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

_COUNTED = {
    zmq.EVENT_ACCEPTED: "accepted",
    zmq.EVENT_ACCEPT_FAILED: "accept_failed",
    zmq.EVENT_DISCONNECTED: "ended",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake_failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "handshake_failed",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "not_authorised",
}


def watch(context: zmq.asyncio.Context, socket: zmq.Socket[bytes], name: str) -> zmq.asyncio.Socket:
    """A socket that gets the monitored events of ``socket``."""
    address = f"inproc://monitor.{name}"
    socket.monitor(address, reduce(or_, _COUNTED))
    monitor = context.socket(zmq.PAIR)
    # Without a limit: at a full queue libzmq's own thread would wait, and with it every connection.
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(address)
    return monitor


async def count(monitor: zmq.asyncio.Socket, name: str, counters: Counter[str]) -> None:
    """Count events as ``connections.NAME.KIND`` for ever."""
    while True:
        event = zmq.Event(parse_monitor_message(await monitor.recv_multipart())["event"])
        if event in _COUNTED:
            counters[f"connections.{name}.{_COUNTED[event]}"] += 1
