"""Names of hosts become addresses, on threads of their own: a name that nobody answers for holds up nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

Address = tuple[socket.AddressFamily, str]

RESOLVE_SECONDS = 2.0
"""How long somebody waits for a name. The system's own look-up may go on for much longer."""
FOUND_SECONDS = 10.0
FAILED_SECONDS = 5.0
"""How long an answer, and a failure, are taken for true."""
THREADS = 8
"""Names being looked up that were never found before."""
THREADS_FOR_KNOWN = 4
"""And of those that were found before: names of nobody, however many, do not hold up the names of peers."""
MOST_NAMES = 4096
"""Names that are remembered, the newest."""

LookUp = Callable[[str], list[Address]]


@dataclass(frozen=True, slots=True)
class NameFound:
    """What is known of a name until ``until`` (time.monotonic()): its addresses, or why there are none."""

    addresses: tuple[Address, ...]
    error: str
    until: float


def look_up(host: str) -> list[Address]:
    """The addresses of a name, in the system's order. May take a minute. Raises `OSError`."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [(family, str(where[0])) for family, _, _, _, where in found]


class Resolver:
    """Looks names up, each once at a time, and remembers what it found."""

    def __init__(self, look: LookUp = look_up) -> None:
        self._look = look
        self._found: OrderedDict[str, NameFound] = OrderedDict()
        self._last_good: OrderedDict[str, tuple[Address, ...]] = OrderedDict()
        self._flights: dict[str, asyncio.Future[NameFound]] = {}
        self._waiting: dict[bool, deque[str]] = {True: deque(), False: deque()}
        self._running = {True: 0, False: 0}

    async def resolve(self, host: str) -> tuple[Address, ...]:
        """The addresses of a name, or of a literal. One that was found before is good until another is found.

        Raises `OSError` where there are none, or none are known after `RESOLVE_SECONDS`.
        """
        if literal := _literal(host):
            return literal
        found = self._found.get(host)
        if found is None or found.until < time.monotonic():
            with contextlib.suppress(TimeoutError):
                found = await asyncio.wait_for(asyncio.shield(self._flight(host)), RESOLVE_SECONDS)
        if found is not None and found.addresses:
            return found.addresses
        if known := self._last_good.get(host):
            return known
        raise OSError(
            found.error if found is not None else f"no answer for {host!r} in {RESOLVE_SECONDS:g} s"
        )

    def _flight(self, host: str) -> asyncio.Future[NameFound]:
        flight = self._flights.get(host)
        if flight is None:
            flight = self._flights[host] = asyncio.get_running_loop().create_future()
            known = host in self._last_good
            self._waiting[known].append(host)
            self._start(known)
        return flight

    def _start(self, known: bool) -> None:
        most = THREADS_FOR_KNOWN if known else THREADS
        while self._waiting[known] and self._running[known] < most:
            host = self._waiting[known].popleft()
            self._running[known] += 1
            # Not an executor's: the end of kvd would wait for those until the system has given up.
            thread = threading.Thread(
                target=self._run, args=(host, known, asyncio.get_running_loop()), name="kvd-name", daemon=True
            )
            try:
                thread.start()
            except (
                RuntimeError
            ) as error:  # the host has no thread left for kvd; whoever asks again tries again
                self._settle(host, known, NameFound((), f"{host!r}: {error}", time.monotonic()))

    def _run(self, host: str, known: bool, loop: asyncio.AbstractEventLoop) -> None:
        try:
            addresses, error = tuple(self._look(host)), ""
        except (OSError, UnicodeError) as failed:
            addresses, error = (), f"{host!r}: {getattr(failed, 'strerror', None) or failed}"
        except Exception as failed:  # whatever it is, those who wait are to hear of it
            log.exception("looking up %r failed", host)
            addresses, error = (), f"{host!r}: {failed!r}"
        until = time.monotonic() + (FOUND_SECONDS if addresses else FAILED_SECONDS)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(self._done, host, known, NameFound(addresses, error, until))

    def _done(self, host: str, known: bool, found: NameFound) -> None:
        self._settle(host, known, found)
        self._start(known)

    def _settle(self, host: str, known: bool, found: NameFound) -> None:
        self._running[known] -= 1
        self._found[host] = found
        self._found.move_to_end(host)
        if found.addresses:
            self._last_good[host] = found.addresses
            self._last_good.move_to_end(host)
        for names in (self._found, self._last_good):
            while len(names) > MOST_NAMES:
                names.popitem(last=False)
        flight = self._flights.pop(host)
        if not flight.done():
            flight.set_result(found)


def _literal(host: str) -> tuple[Address, ...]:
    """An address that needs no look-up, with its family; nothing for a name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return ()
    return tuple((family, str(where[0])) for family, _, _, _, where in found)
