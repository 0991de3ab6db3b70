"""Who may have how many bytes of large frames here at a time. Whoever wants more waits for its turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kvd.service.sockets.limits import INCOMING_BYTES, INCOMING_PROCESS_BYTES, INCOMING_USER_BYTES
from kvd.service.sockets.turns import Path, Turns


@dataclass(slots=True, eq=False)
class Hold:
    """Bytes that somebody may have here until they are released, or a wish for them while they are not ``granted``."""

    reservations: Reservations
    path: Path
    size: int
    on_granted: Callable[[], None]
    granted: bool = False
    released: bool = False

    def release(self) -> None:
        """Give the bytes back, or the wish up. Idempotent."""
        if not self.released:
            self.released = True
            self.reservations.released(self)


class Reservations:
    """Bytes in all, for one user, and for one process. A frame that is larger than a share comes alone in it."""

    def __init__(self) -> None:
        self.total = 0
        self._users: Counter[Hashable] = Counter()
        self._processes: Counter[Path] = Counter()
        self._waiting: Turns[Hold] = Turns()
        self._first: Hold | None = None
        self._granting = False

    def ask(self, path: Path, size: int, on_granted: Callable[[], None]) -> Hold:
        """A hold that is granted now, or later: then ``on_granted`` is called."""
        hold = Hold(self, path, size, on_granted)
        if not self._waiting and self._first is None and self._fits(hold):
            self._grant(hold)
        else:
            self._waiting.put(path, hold)
            self._go_on(silent=hold)
        return hold

    def released(self, hold: Hold) -> None:
        """For `Hold.release`."""
        if hold.granted:
            self.total -= hold.size
            self._users[hold.path[0]] -= hold.size
            self._processes[hold.path] -= hold.size
            if not self._processes[hold.path]:
                del self._processes[hold.path]
            if not self._users[hold.path[0]]:
                del self._users[hold.path[0]]
        self._go_on()

    def _go_on(self, silent: Hold | None = None) -> None:
        if self._granting:
            return  # the loop below will see it
        self._granting = True
        passed_over = []
        try:
            while (hold := self._first or self._waiting.take()) is not None:
                self._first = None
                if hold.released:
                    continue
                if self._fits(hold):
                    self._grant(hold)
                    if hold is not silent:
                        hold.on_granted()
                elif self.total and self.total + hold.size > INCOMING_BYTES:
                    self._first = (
                        hold  # nobody overtakes who waits for room in the whole: it would never come
                    )
                    break
                else:
                    passed_over.append(hold)
        finally:
            self._granting = False
            for hold in passed_over:
                self._waiting.put(hold.path, hold)

    def _fits(self, hold: Hold) -> bool:
        user, process = self._users[hold.path[0]], self._processes[hold.path]
        return (
            (not self.total or self.total + hold.size <= INCOMING_BYTES)
            and (not user or user + hold.size <= INCOMING_USER_BYTES)
            and (not process or process + hold.size <= INCOMING_PROCESS_BYTES)
        )

    def _grant(self, hold: Hold) -> None:
        hold.granted = True
        self.total += hold.size
        self._users[hold.path[0]] += hold.size
        self._processes[hold.path] += hold.size
