"""Who may have how many bytes of large frames here at a time. Whoever wants more waits for its turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from kvd.service.fairness.queue import Path
from kvd.service.fairness.tally import Tally
from kvd.service.sockets.limits import INCOMING_BYTES, INCOMING_PROCESS_BYTES, INCOMING_USER_BYTES


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


@dataclass(slots=True)
class Wishes:
    """What one user's processes wait for, by process.

    Of those in ``parked`` nothing more fits into their share; ``full``: nothing more fits into the user's.
    """

    ready: OrderedDict[Path, OrderedDict[Hold, None]] = field(default_factory=OrderedDict)
    parked: dict[Path, OrderedDict[Hold, None]] = field(default_factory=dict)
    full: bool = False

    def add(self, hold: Hold) -> None:
        """One more, behind those of its process."""
        holds = self.parked.get(hold.path)
        if holds is None:
            holds = self.ready.setdefault(hold.path, OrderedDict())
        holds[hold] = None

    def drop(self, hold: Hold) -> None:
        """One less."""
        for processes in (self.ready, self.parked):
            if (holds := processes.get(hold.path)) is not None:
                holds.pop(hold, None)
                if not holds:
                    del processes[hold.path]

    def look_again(self, path: Path) -> None:
        """There may be room for the user and for that process of it."""
        self.full = False
        if (holds := self.parked.pop(path, None)) is not None:
            self.ready[path] = holds


class Reservations:
    """Bytes in all, for one user, and for one process. A frame that is larger than a share comes alone in it.

    Nobody overtakes who waits for room in the same share: it would never come. Who waits for room in a share is looked
    at again when some of that share was released, so no look is longer where thousands wait.
    """

    def __init__(self) -> None:
        self._users: Tally[Hashable] = Tally()
        self._processes: Tally[Path] = Tally()
        self._wishes: dict[Hashable, Wishes] = {}
        self._turns: OrderedDict[Hashable, None] = OrderedDict()
        """Users of whom something may fit; the first is next."""
        self._granting = False

    @property
    def total(self) -> int:
        """Bytes that are granted now."""
        return self._users.total

    def ask(self, path: Path, size: int, on_granted: Callable[[], None]) -> Hold:
        """A hold that is granted now, or later: then ``on_granted`` is called."""
        hold = Hold(self, path, size, on_granted)
        self._wishes.setdefault(path[0], Wishes()).add(hold)
        self._queue(path[0])
        self._go_on(silent=hold)
        return hold

    def released(self, hold: Hold) -> None:
        """For `Hold.release`."""
        user = hold.path[0]
        if hold.granted:
            self._count(hold, -hold.size)
        if (wishes := self._wishes.get(user)) is not None:
            wishes.drop(hold)
            wishes.look_again(hold.path)
            self._queue(user)
        self._go_on()

    def _queue(self, user: Hashable) -> None:
        """Give a user a turn, keep it or take it away, as it has something that may fit."""
        wishes = self._wishes[user]
        if wishes.ready and not wishes.full:
            self._turns.setdefault(user)
            return
        self._turns.pop(user, None)
        if not wishes.ready and not wishes.parked:
            del self._wishes[user]

    def _go_on(self, silent: Hold | None = None) -> None:
        """Grant what fits. The owner of ``silent`` sees for itself."""
        if self._granting:
            return  # the loop below will see it
        self._granting = True
        try:
            while self._turns:
                user = next(iter(self._turns))
                hold = self._next(user)
                if hold is None:
                    self._queue(user)
                    continue
                if not _fits(self.total, hold.size, INCOMING_BYTES):
                    break
                self._grant(hold)
                if hold is not silent:
                    hold.on_granted()
        finally:
            self._granting = False

    def _next(self, user: Hashable) -> Hold | None:
        """What is next of a user's; None where it does not fit into its process' or the user's share."""
        wishes = self._wishes[user]
        path, holds = next(iter(wishes.ready.items()))
        hold = next(iter(holds))
        if not _fits(self._processes[path], hold.size, INCOMING_PROCESS_BYTES):
            wishes.parked[path] = wishes.ready.pop(path)
            return None
        if not _fits(self._users[user], hold.size, INCOMING_USER_BYTES):
            wishes.full = True
            return None
        return hold

    def _grant(self, hold: Hold) -> None:
        hold.granted = True
        self._count(hold, hold.size)
        user = hold.path[0]
        wishes = self._wishes[user]
        wishes.drop(hold)
        if hold.path in wishes.ready:
            wishes.ready.move_to_end(hold.path)
        del self._turns[user]
        self._queue(user)

    def _count(self, hold: Hold, size: int) -> None:
        self._users.add(hold.path[0], size)
        self._processes.add(hold.path, size)


def _fits(taken: int, size: int, most: int) -> bool:
    return not taken or taken + size <= most
