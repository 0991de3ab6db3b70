"""Names of hosts become addresses, on threads of their own: a name that nobody answers for holds up nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Literal

from kvd.service.sockets.fair_lines import ASKER, FairLines, LineFull

log = logging.getLogger(__name__)

Address = tuple[socket.AddressFamily, str]

RESOLVE_SECONDS = 2.0
"""How long somebody waits for a name. The system's own look-up may go on for much longer."""
FOUND_SECONDS = 10.0
FAILED_SECONDS = 5.0
"""How long an answer, and a failure, are taken for true."""
NameKind = Literal["kept", "known", "new"]
"""Of a peer that the operator wrote down (``peer.connect``); found before; never found."""
THREADS: Mapping[NameKind, int] = {"kept": 4, "known": 4, "new": 32}
"""Names being looked up: those that a client names, however many, do not hold up the names of peers."""
MOST_WAITING = 1024
"""Names of one kind that wait for that. Nobody waits for longer than `RESOLVE_SECONDS`, then they wait no more."""
MOST_NAMES = 4096
"""Names that are remembered, the newest."""

LookUp = Callable[[str], list[Address]]


@dataclass(frozen=True, slots=True)
class NameFound:
    """What is known of a name until ``until`` (time.monotonic()): its addresses, or why there are none."""

    addresses: tuple[Address, ...]
    error: str
    until: float


@dataclass(slots=True)
class NameFlight:
    """A name that is looked up (``began``) or waits for that, and how many wait for its answer."""

    answer: asyncio.Future[NameFound]
    kind: NameKind
    waiters: int = 0
    began: bool = False


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
        self._flights: dict[str, NameFlight] = {}
        self._waiting: dict[NameKind, FairLines[str]] = {
            kind: FairLines(threads, MOST_WAITING) for kind, threads in THREADS.items()
        }

    async def resolve(self, host: str, *, kept: bool = False) -> tuple[Address, ...]:
        """The addresses of a name, or of a literal. One that was found before is good until another is found.

        ``kept``: the operator wrote it down. Raises `OSError` where there are none, or none are known after
        `RESOLVE_SECONDS`.
        """
        if known := literal(host):
            return known
        found = self._found.get(host)
        if found is None or found.until < time.monotonic():
            found = await self._looked_up(
                host, "kept" if kept else "known" if host in self._last_good else "new"
            )
        if found.addresses:
            return found.addresses
        if before := self._last_good.get(host):
            return before
        raise OSError(found.error)

    async def look_again(self, host: str) -> tuple[Address, ...]:
        """The addresses that a name has now, whatever was found before. The operator wrote it down.

        Raises `OSError` where there are none, or no answer comes within `RESOLVE_SECONDS`.
        """
        if known := literal(host):
            return known
        found = await self._looked_up(host, "kept")
        if not found.addresses:
            raise OSError(found.error)
        return found.addresses

    async def _looked_up(self, host: str, kind: NameKind) -> NameFound:
        """What is found of a name, or that nothing was in time."""
        flight = self._flights.get(host)
        if flight is None:
            flight = NameFlight(asyncio.get_running_loop().create_future(), kind)
        try:
            if not flight.began:
                self._waiting[flight.kind].put(host, ASKER.get())
        except LineFull as full:
            return NameFound((), f"{host!r} is not looked up: {full}", 0.0)
        self._flights[host] = flight
        flight.waiters += 1
        self._start(flight.kind)
        try:
            async with asyncio.timeout(RESOLVE_SECONDS):
                return await asyncio.shield(flight.answer)
        except TimeoutError:
            return NameFound((), f"no answer for {host!r} in {RESOLVE_SECONDS:g} s", 0.0)
        finally:
            flight.waiters -= 1
            if not (flight.waiters or flight.began or flight.answer.done()):
                self._waiting[flight.kind].drop(host)
                del self._flights[host]

    def _start(self, kind: NameKind) -> None:
        while (taken := self._waiting[kind].take()) is not None:
            host, asker = taken
            flight = self._flights[host]
            flight.began = True
            # Not an executor's: the end of kvd would wait for those until the system has given up.
            thread = threading.Thread(
                target=self._run, args=(host, asker, asyncio.get_running_loop()), name="kvd-name", daemon=True
            )
            try:
                thread.start()
            except (
                RuntimeError
            ) as error:  # the host has no thread left for kvd; whoever asks again tries again
                self._settle(host, asker, NameFound((), f"{host!r}: {error}", time.monotonic()))

    def _run(self, host: str, asker: Hashable, loop: asyncio.AbstractEventLoop) -> None:
        try:
            addresses, error = tuple(self._look(host)), ""
        except (OSError, UnicodeError) as failed:
            addresses, error = (), f"{host!r}: {getattr(failed, 'strerror', None) or failed}"
        except Exception as failed:  # whatever it is, those who wait are to hear of it
            log.exception("looking up %r failed", host)
            addresses, error = (), f"{host!r}: {failed!r}"
        until = time.monotonic() + (FOUND_SECONDS if addresses else FAILED_SECONDS)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(self._done, host, asker, NameFound(addresses, error, until))

    def _done(self, host: str, asker: Hashable, found: NameFound) -> None:
        kind = self._flights[host].kind
        self._settle(host, asker, found)
        self._start(kind)

    def _settle(self, host: str, asker: Hashable, found: NameFound) -> None:
        flight = self._flights.pop(host)
        self._waiting[flight.kind].done(asker)
        self._found[host] = found
        self._found.move_to_end(host)
        if found.addresses:
            self._last_good[host] = found.addresses
            self._last_good.move_to_end(host)
        for names in (self._found, self._last_good):
            while len(names) > MOST_NAMES:
                names.popitem(last=False)
        if not flight.answer.done():
            flight.answer.set_result(found)


def literal(host: str) -> tuple[Address, ...]:
    """An address that needs no look-up, with its family; nothing for a name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return ()
    return tuple((family, str(where[0])) for family, _, _, _, where in found)
