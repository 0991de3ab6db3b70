"""Silence: how long other kvds have not answered, as this one saw it and as others say.

A link that nobody needs is pinged now and then, so its own pings would find out late that a host has no power. But of
many kvds some ping it at any moment. Whoever gets no answer says so with its pings and answers, and whoever hears it
pings that host at once, and says so too. What others say ends nothing: a kvd counts another one as down only if that
did not answer itself.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvd.wire.handshake import MOST_SILENT, Silent

TOLD_SECONDS = 10.0
"""For so long a silence is told of. Whoever is linked knows of it by then."""


@dataclass(slots=True)
class Silence:
    """That of one link. All of these are time.monotonic().

    ``last_heard`` is of the last answer, ``asked`` of the first question since, and ``hearsay`` since when others have
    had no answer.
    """

    last_heard: float = field(default_factory=time.monotonic)
    asked: float = field(default_factory=time.monotonic)
    hearsay: float = math.inf

    @property
    def since(self) -> float:
        """Since when it counts: from the first question on, or earlier where others had no answer either."""
        return max(self.last_heard, min(self.asked, self.hearsay))

    @property
    def seconds(self) -> float:
        """How long it is."""
        return time.monotonic() - self.since

    def outweighs(self, since: float, fresh: float) -> bool:
        """Whether the last answer says more than that others have had none since then.

        It came later, and not over ``fresh`` seconds ago: the last one of a host may come after others asked in vain.
        """
        return self.last_heard > max(since, time.monotonic() - fresh)

    def end(self) -> None:
        """An answer came."""
        self.last_heard = self.asked = time.monotonic()
        self.hearsay = math.inf


class Silences:
    """Those that this kvd tells others of, by the generation of the kvd that is silent, with since when it is.

    ``suspect`` is called with what others say: the generation, and since when. It says whether that is news. ``pause``
    is how long a link that nobody needs is left alone.
    """

    def __init__(
        self,
        suspect: Callable[[str, float], bool] = lambda _generation, _since: False,
        pause: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._suspect, self.pause = suspect, pause
        self._since: dict[str, float] = {}

    def note(self, generation: str, since: float) -> None:
        """A kvd has not answered since then."""
        if generation:
            self._since.setdefault(generation, since)

    def end(self, generation: str) -> None:
        """A kvd answers."""
        self._since.pop(generation, None)

    def told(self) -> Silent:
        """What others are told, with how long each silence is; some of many."""
        if not self._since:
            return ()
        now = time.monotonic()
        self._since = {one: since for one, since in self._since.items() if now - since < TOLD_SECONDS}
        told = [(one, now - since) for one, since in self._since.items()]
        return tuple(told if len(told) <= MOST_SILENT else random.sample(told, MOST_SILENT))

    def hear(self, told: Iterable[tuple[str, float]]) -> None:
        """Another kvd says this."""
        now = time.monotonic()
        for generation, seconds in told:
            fresh = generation not in self._since and 0.0 <= seconds < TOLD_SECONDS
            if fresh and self._suspect(generation, now - seconds):
                self._since[generation] = now - seconds
