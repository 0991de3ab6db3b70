"""Ports for servers of tests, from a range that the system hands out to nobody by itself.

A port that the system picked is anybody's again while its server is away: the next one that asks for any port may get
it, and the one that comes back cannot listen.
"""

from __future__ import annotations

import contextlib
import random
import socket

FIRST, END = 15_000, 30_000
"""Below what /proc/sys/net/ipv4/ip_local_port_range begins with."""
_CHOSEN: set[int] = set()
"""By this process, so that it names none twice before anybody listens there."""


def free_port(host: str = "127.0.0.1", count: int = 1) -> int:
    """The first of so many ports side by side at which nobody listens now; each call gives others."""
    while True:
        first = random.SystemRandom().randrange(FIRST, END, count)
        ports = range(first, first + count)
        if not _CHOSEN.isdisjoint(ports):
            continue
        with contextlib.suppress(OSError):
            for port in ports:
                socket.create_server((host, port)).close()
            _CHOSEN.update(ports)
            return first
