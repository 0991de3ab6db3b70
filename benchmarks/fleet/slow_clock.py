"""A clock that goes slower than the wall's, for this process and all that it forks: many hosts fit on few cores.

At a rate of 1/50 a kvd believes that a second has passed when 50 have. It sends as many messages a second *of its own*
as ever, and has 50 times as much of a processor for them. So 256 hosts on two cores behave as 256 hosts with a third of
a core each. What needs no processor does not get slower: a packet on loopback arrives 50 times sooner, by that clock.

A thread's and a process's own times are not changed, so costs are those of a real processor.
"""

from __future__ import annotations

import select
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

wall = time.monotonic
"""The clock on the wall, in seconds."""


@dataclass
class Clock:
    """``slower``: seconds on the wall in a second of this process's clock."""

    slower: float = 1.0


CLOCK = Clock()

_poll = select.poll
_select = selectors.EpollSelector.select
_sleep = time.sleep
_settimeout = socket.socket.settimeout
_wait = threading.Condition.wait


class _Poll:
    """`select.poll` with timeouts by the slow clock."""

    def __init__(self, slower: float) -> None:
        self._slower, self._poll = slower, _poll()
        self.register, self.modify, self.unregister = (
            self._poll.register,
            self._poll.modify,
            self._poll.unregister,
        )

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        """Wait."""
        return self._poll.poll(
            None if milliseconds is None or milliseconds < 0 else milliseconds * self._slower
        )


def slow_down(slower: float) -> None:
    """From now on a second takes ``slower`` seconds. Call it once, before anything is started."""
    CLOCK.slower = slower
    began, unix_now = wall(), time.time
    at = unix_now()

    def monotonic() -> float:
        return began + (wall() - began) / slower

    def wait(self: Any, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return _select(self, None if timeout is None else timeout * slower)

    def unix() -> float:
        return at + (unix_now() - at) / slower

    def timeout_of(self: socket.socket, seconds: float | None) -> None:
        _settimeout(self, None if seconds is None else seconds * slower)

    def wait_notified(self: threading.Condition, seconds: float | None = None) -> bool:
        return _wait(self, None if seconds is None else seconds * slower)

    threading.Condition.wait = wait_notified  # type: ignore[method-assign,assignment]
    time.monotonic, time.time = monotonic, unix
    time.perf_counter = monotonic
    time.sleep = lambda seconds: _sleep(float(seconds) * slower)
    selectors.EpollSelector.select = wait  # type: ignore[method-assign]
    socket.socket.settimeout = timeout_of  # type: ignore[assignment,method-assign]
    select.poll = lambda: _Poll(slower)  # type: ignore[misc,assignment,return-value]


def pause(seconds: float) -> None:
    """Sleep by the clock on the wall."""
    _sleep(seconds)
