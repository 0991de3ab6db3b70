"""Who was not let in on the peer socket of late: remembered for operators, and told in the log now and then."""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from kvd.wire.query import RefusedKey
from kvd.zmtp.errors import ZmtpError

log = logging.getLogger(__name__)

MOST_REMEMBERED = 16
"""Keys and addresses: whoever has no key can make up as many as he likes."""
MOST_REVOKED = 256
LONGEST_PLACE = 512
"""Characters that are kept of where a key was trusted for: a list may name it for thousands of places."""
TOLD_SECONDS = 600.0
"""How long one key from one address is not told again: a kvd that is refused tries twice a second."""
BETWEEN_SECONDS = 10.0
"""Shortest time between two such lines in the log, whoever they are about."""

CallerAddress = tuple[bytes, str]
"""A key, empty where another one of ours is expected, and an address."""


@dataclass(slots=True)
class Attempts:
    """What one caller tried: how often, when last, and when that was told last (time.monotonic)."""

    times: int = 0
    last: float = 0.0
    told: float = -TOLD_SECONDS


class Refusals:
    """The callers that were refused last, and the places of keys that were revoked since kvd started."""

    def __init__(self) -> None:
        self._callers: dict[CallerAddress, Attempts] = {}
        self._revoked: dict[bytes, str] = {}
        self._told = -BETWEEN_SECONDS

    def note(self, whose: Hashable, error: ZmtpError) -> None:
        """A connection from ``whose``, an address or a network of IPv6, ended in its handshake with this error."""
        if error.kind not in {"not_authorised", "other_key"}:
            return
        caller = error.key, _address(whose)
        if caller not in self._callers:
            self._make_room()
        attempts = self._callers.setdefault(caller, Attempts())
        attempts.times += 1
        attempts.last = time.monotonic()
        if attempts.last - max(attempts.told + TOLD_SECONDS, self._told + BETWEEN_SECONDS) >= 0:
            attempts.told = self._told = attempts.last
            self._tell(caller)

    def revoked(self, key: bytes, place: str) -> None:
        """That key was trusted until now."""
        self._revoked[key] = place[:LONGEST_PLACE]
        while len(self._revoked) > MOST_REVOKED:
            del self._revoked[next(iter(self._revoked))]

    def trusted(self, key: bytes) -> None:
        """That key is let in from now on: what it was refused before counts no more."""
        self._revoked.pop(key, None)
        for caller in [one for one in self._callers if one[0] == key]:
            del self._callers[caller]

    def rows(self) -> tuple[RefusedKey, ...]:
        """Whom operators are told of, the latest first."""
        now = time.monotonic()
        latest = sorted(self._callers.items(), key=lambda one: -one[1].last)
        return tuple(
            RefusedKey(
                key=key.decode(),
                address=address,
                times=attempts.times,
                age=now - attempts.last,
                was=self._revoked.get(key, ""),
            )
            for (key, address), attempts in latest
        )

    def _tell(self, caller: CallerAddress) -> None:
        key, address = caller[0].decode(), caller[1]
        if not key:
            log.warning(
                "peer socket: %s expects another key of this kvd than it has, and is not let in: `kvctl keys show` here"
                " prints what that host is to trust (with --replace)",
                address,
            )
        elif caller[0] in self._revoked:
            log.warning("peer socket: %s comes with the revoked key %s, and is not let in", address, key)
        else:
            log.warning(
                "peer socket: %s comes with the key %s, which is not trusted here, and is not let in: where it is that"
                " host's (`kvctl keys show` there), type kvctl keys trust '%s' HOST:PORT",
                address, key, key,
            )  # fmt: skip

    def _make_room(self) -> None:
        """Of the addresses with most keys the one that is silent longest goes: a stranger displaces himself first."""
        if len(self._callers) < MOST_REMEMBERED:
            return
        keys = Counter(address for _, address in self._callers)
        of_most = [caller for caller in self._callers if keys[caller[1]] == max(keys.values())]
        del self._callers[min(of_most, key=lambda caller: self._callers[caller].last)]


def _address(whose: Hashable) -> str:
    """An address as an operator writes it; of IPv6 connections are counted by their network."""
    if isinstance(whose, bytes):
        return f"{socket.inet_ntop(socket.AF_INET6, whose + bytes(8))}/64"
    return str(whose)
