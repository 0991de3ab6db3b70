"""What a source tells of other kvds, checked: whoever writes there may write anything."""

from __future__ import annotations

import ipaddress
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from kvd.addresses import is_loopback, join_address, split_address
from kvd.shown import brief, cut, escaped
from kvd.wire.identity import Endpoint

log = logging.getLogger(__name__)

MOST_MEMBERS = 4096
"""Other kvds that a source may name."""
LONGEST_HOST = 255
_HOST = re.compile(r"[A-Za-z0-9._:%-]+")
"""Of a name or an address; with nothing in it that a terminal or a log would obey."""
MOST_LINES = 32
LINES_SECONDS = 60.0
"""So many lines of one kind in so many seconds tell of what a source says. Further ones are counted."""
LineKind = Literal["value", "name", "place", "key", "trust", "many", "joined", "forgotten"]
"""What a line is about: a value, our own name, a place, a key, that none is trusted, the number, who came and went."""
LONGEST_SHOWN = 80


class Untold(ValueError):
    """Something that a source tells and that is no kvd; the message may be logged."""


@dataclass(frozen=True, slots=True)
class ToldHost:
    """A kvd that a source names. ``key`` is what it says of that host's key; None where it says nothing of keys."""

    endpoint: Endpoint
    key: str | None = None
    generation: str = ""
    name: str = ""


def place(text: str) -> Endpoint:
    """``host:port`` as a source has it. Raises `Untold`."""
    shown = shortly(text)
    try:
        host, port = split_address(text)
    except ValueError:
        raise Untold(f"{shown} is not host:port") from None
    return place_of(host, port)


def place_of(host: str, port: int) -> Endpoint:
    """A place at which a kvd may be. Raises `Untold`: no port, an address of nobody or of many, no name."""
    if len(host) > LONGEST_HOST or not _HOST.fullmatch(host):
        raise Untold(f"{shortly(host)} is no name and no address of a host")
    if not 0 < port < 65536:
        raise Untold(f"{join_address(host, port)} has no port at which a kvd may be")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return Endpoint(host, port)
    if address.is_unspecified or address.is_multicast:
        raise Untold(f"{join_address(host, port)} is the address of no host")
    return Endpoint(str(address), port)


def shortly(text: str) -> str:
    """Text that others chose, for a line of the log."""
    return repr(escaped(cut(text, LONGEST_SHOWN)))


def refused(endpoint: Endpoint, here: Endpoint, expected: str | None) -> str:
    """Why a place that a source names is never linked, empty where it may be.

    ``expected`` as `PeerLinks.expected` has it. Kvds without keys are on loopback only, and so are their members: else
    a source could have this kvd believe whoever answers at an address of its choice.
    """
    if expected is None and not is_loopback(endpoint.host):
        return "it is not on loopback, and peers have no keys here"
    if is_loopback(endpoint.host) and not is_loopback(here.host):
        return "it is on loopback, which other hosts do not reach"
    return ""


def another_key(told: Iterable[ToldHost], expected: str | None) -> str | None:
    """The key that a source tells of a host where another one is expected; None where they agree or nothing is told.

    Where it names a host twice, one entry that agrees is enough. A host for which no key is expected is not judged.
    """
    keys = [one.key for one in told if one.key is not None]
    if not keys or expected == "" or (expected or "") in keys:
        return None
    return keys[0]


@dataclass(slots=True)
class Lines:
    """Tells the log what is wrong with what a source says: each thing once, and few things of a kind in a minute."""

    counters: Counter[str]
    say: Callable[[str], None] = log.warning
    _since: float = 0.0
    _count: Counter[LineKind] = field(default_factory=Counter)
    _said: dict[str, None] = field(default_factory=dict)

    def warn(self, kind: LineKind, text: str) -> None:
        """Say it as a warning, unless it was said before."""
        if text in self._said:
            return
        self._said[text] = None
        while len(self._said) > MOST_MEMBERS:
            del self._said[next(iter(self._said))]
        self.tell(kind, text, self.say)

    def tell(self, kind: LineKind, text: str, say: Callable[[str], None] = log.info) -> None:
        """Say it, unless too much of that kind was said."""
        now = time.monotonic()
        if now - self._since > LINES_SECONDS:
            self._since = now
            self._count.clear()
        if self._count[kind] >= MOST_LINES:
            self.counters["membership.lines_dropped"] += 1
            return
        self._count[kind] += 1
        say(escaped(brief(text)))
