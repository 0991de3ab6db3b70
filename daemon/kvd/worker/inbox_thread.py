"""The shell of a thread that works with one peer: its inbox, its rounds, what an error does to it, and its end.

What each such thread does in a round is its owner's: `kvd.worker.pull.reader`, `kvd.worker.push.receiver` and
`kvd.worker.push.sender` hold one.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kvd.shown import logger

log = logger(__name__)

Word = TypeVar("Word")


class Bell(Protocol):
    """Wakes a thread that has more to wait for than words."""

    def ring(self, *, urgent: bool) -> None:
        """There is something to look at; any thread rings."""

    def wait(self, pause: float | None) -> None:
        """Wait until it rings, or for so many seconds at most."""


@dataclass(frozen=True, slots=True)
class Rounds(Generic[Word]):
    """What a thread does, all of it on that thread.

    A round waits ``pause`` seconds for a word, forever where that is None; it has each word that came ``take``n, and
    ends with ``turn``. An error of these ends the round, is logged and given to ``failed``. ``finish`` comes after the
    last round, ``begin`` before the first.
    """

    pause: Callable[[], float | None]
    take: Callable[[Word], None]
    turn: Callable[[], None]
    failed: Callable[[Exception], None]
    finish: Callable[[], None]
    begin: Callable[[], None] = lambda: None


def holding(lock: threading.Lock, work: Callable[..., None]) -> Callable[..., None]:
    """The same work, done while the lock is held: somebody else may do such work too."""

    def locked(*given: Any) -> None:
        with lock:
            work(*given)

    return locked


class InboxThread(Generic[Word]):
    """A thread that goes its rounds until it is stopped; it must outlive whatever one round does.

    It starts when it is made, so its owner makes it last. `put` and `stop` only put something into a queue and return.
    """

    def __init__(
        self,
        name: str,
        what: str,
        rounds: Rounds[Word],
        *,
        bell: Bell | None = None,
        one_by_one: bool = False,
    ) -> None:
        """``what`` names its work in the log. With a ``bell`` it waits for that, which each word rings.

        ``one_by_one``: a round takes one word, else all that have come.
        """
        self._what = what
        self._rounds = rounds
        self._bell = bell
        self._one_by_one = one_by_one
        self._inbox: queue.Queue[Word | None] = queue.Queue()
        self._by: deque[Word] = deque()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # --- any thread ---

    def put(self, word: Word) -> None:
        """Have this taken in one of the next rounds."""
        self._put(word)

    def put_by(self, word: Word) -> None:
        """Have this taken in the next round, whenever that is: it brings none about, and the thread may be `idle`."""
        self._by.append(word)

    @property
    def idle(self) -> bool:
        """Whether every word that was `put` in has been dealt with; never again after `stop`."""
        return not self._inbox.unfinished_tasks

    @property
    def alive(self) -> bool:
        """Whether it has not come to its end."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End after the words that were put in before: begin that."""
        self._put(None)

    def join(self, timeout: float) -> bool:
        """Wait for the end after `stop`. False where it has not come in so many seconds."""
        self._thread.join(max(0.0, timeout))
        return not self.alive

    def _put(self, word: Word | None) -> None:
        self._inbox.put(word)
        if self._bell is not None:
            self._bell.ring(urgent=True)

    # --- the thread itself ---

    def next_word(self) -> Word | None:
        """The next word, for `Rounds.finish` that still waits for some; None for a further `stop`."""
        return self._inbox.get()

    def _run(self) -> None:
        self._rounds.begin()
        while self._round():
            pass
        self._rounds.finish()

    def _round(self) -> bool:
        """Whether another one follows."""
        try:
            if not self._take_words():
                return False
            while self._by:
                self._rounds.take(self._by.popleft())
            self._rounds.turn()
        except Exception as error:
            log.exception("%s: unexpected error", self._what)
            self._rounds.failed(error)
        return True

    def _take_words(self) -> bool:
        """False where it is stopped."""
        pause = self._rounds.pause()
        if self._bell is not None:
            self._bell.wait(pause)
            pause = 0.0
        try:
            while (word := self._inbox.get(block=pause != 0.0, timeout=pause)) is not None:
                try:
                    self._rounds.take(word)
                finally:
                    self._inbox.task_done()
                if self._one_by_one:
                    return True
                pause = 0.0
        except queue.Empty:
            return True
        return False
