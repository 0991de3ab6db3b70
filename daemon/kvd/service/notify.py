"""systemd's notification protocol: readiness, status and the watchdog, over ``$NOTIFY_SOCKET``."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Notifier:
    """Where the service manager listens. ``address`` None: there is none, and every call does nothing.

    ``watchdog_seconds`` is how often it wants to hear from us at the latest, 0 for never.
    """

    address: str | None = None
    watchdog_seconds: float = 0.0

    def ready(self, status: str) -> None:
        """The sockets are bound (again, after a reload)."""
        self._send(f"READY=1\nSTATUS={status}\nMAINPID={os.getpid()}")

    def reloading(self) -> None:
        """A reload began; `ready` ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The end began."""
        self._send("STOPPING=1")

    def watchdog(self) -> None:
        """Still serving."""
        self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if self.address is None:
            return
        # A name that begins with @ is in the abstract namespace, where the first byte is zero.
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.setblocking(False)
                out.sendto(text.encode(), address)
        except OSError as error:
            log.warning("cannot notify the service manager at %s: %s", self.address, error)


def from_environment(environment: Mapping[str, str]) -> Notifier:
    """The notifier that ``NOTIFY_SOCKET``, ``WATCHDOG_USEC`` and ``WATCHDOG_PID`` describe."""
    address = environment.get("NOTIFY_SOCKET") or None
    micros = environment.get("WATCHDOG_USEC", "")
    for_us = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return Notifier(address, int(micros) / 1e6 if for_us and micros.isdigit() else 0.0)
