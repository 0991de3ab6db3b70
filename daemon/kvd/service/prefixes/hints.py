"""What this kvd knows of what engines hold: of its own by what their schedulers tell, of others by their kvds.

All of it is out of date by some milliseconds or seconds. It says whom to ask, and nothing else. What is known of an
engine ends with its process, and with the link over which it came.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Hashable, Mapping

import msgspec
import numpy as np

from kvd.service.fairness.tally import Tally
from kvd.service.prefixes.tags import NONE, PromptTags, TagSet, changed, longest, member, packed, unpacked
from kvd.wire.identity import HERE, Endpoint
from kvd.wire.prefixes.hints import MOST_TAGS, TAG_BYTES, HintChange

MOST_KEPT = 16 << 20
"""Tags of all engines together, 128 MiB: 256 hosts with eight full caches of a million tokens have half of it. Engines
beyond that are asked as if they told nothing."""
MOST_KEPT_OF_ONE = MOST_KEPT // 4 * 3
"""The same of one user here, or of one other kvd."""
MOST_REMEMBERED = MOST_KEPT // 2
"""Tags of changes that are remembered, of all engines together."""
MOST_CHANGES = 256
"""Changes of an engine that are remembered, for kvds that know what was before them."""


class Hint(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine holds, as far as is known. ``of`` is its generation; of one here, its scheduler's incarnation."""

    of: str
    version: int
    hash_tokens: int
    every: int
    tags: TagSet

    @property
    def step(self) -> int:
        """Tokens from one tag to the next."""
        return self.every * self.hash_tokens

    def held(self, prompt: PromptTags) -> int:
        """How many tokens of a prompt the engine holds by its tags; it may be up to a `step` more."""
        if prompt.hash_tokens != self.hash_tokens:
            return 0
        return longest(prompt.each(self.every), self.tags) * self.step


class _Told(msgspec.Struct):
    """An engine's hint, whose it is, and the tags that each of the last changes ``touched``, so many together."""

    hint: Hint
    whose: Hashable
    changes: deque[tuple[int, TagSet]] = msgspec.field(default_factory=deque)
    touched: int = 0

    def remember(self, touched: TagSet) -> None:
        """The newest change touched these. Changes that are together more than all tags are of no use."""
        self.changes.append((self.hint.version, touched))
        self.touched += len(touched)
        while len(self.changes) > MOST_CHANGES or self.touched > len(self.hint.tags):
            self.touched -= len(self.changes.popleft()[1])

    def forget_changes(self) -> None:
        """Whoever asks next is told all."""
        self.changes.clear()
        self.touched = 0


HintKey = tuple[Endpoint, str]


class Hints:
    """Of all engines that are known, by their kvd and their id; those here are at `HERE`."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._told: dict[HintKey, _Told] = {}
        self._kept: Tally[Hashable] = Tally()
        self._touched = 0
        self._asking: dict[bytes, HintQuestion] = {}
        self._closed = False

    @property
    def kept(self) -> int:
        """Tags that are known, of all engines."""
        return self._kept.total

    @property
    def remembered(self) -> int:
        """Tags of changes that are remembered, of all engines."""
        return self._touched

    def rows(self) -> list[tuple[HintKey, Hint]]:
        """All of it."""
        return [(key, told.hint) for key, told in self._told.items()]

    def get(self, key: HintKey, of: str) -> Hint | None:
        """What is known of an engine, if it is of that generation (of one here: of that scheduler)."""
        told = self._told.get(key)
        return told.hint if told is not None and told.hint.of == of else None

    def take(self, key: HintKey, of: str, change: HintChange, whose: Hashable = None) -> int:
        """A change was told; gives the version that is known then, 0 if all has to be told.

        ``whose`` it counts as is a user for engines here, and another kvd for its own. What makes no sense is counted,
        and what was known of the engine is dropped.
        """
        told = self._told.get(key)
        if told is not None and told.hint.of != of:
            self.drop(key)
            told = None
        before = told.hint if told is not None else None
        if change.since and (before is None or change.since != before.version):
            return before.version if before is not None else 0
        added, dropped = unpacked(change.added), unpacked(change.dropped)
        tags = changed(before.tags if before is not None and change.since else NONE, added, dropped)
        if len(tags) > MOST_TAGS or any(len(one) % TAG_BYTES for one in (change.added, change.dropped)):
            self._counters["prefixes.hints_malformed"] += 1
            self.drop(key)
            return 0
        self.drop(key)
        owner = key[0] if whose is None else whose
        if self._kept.total + len(tags) > MOST_KEPT or self._kept[owner] + len(tags) > MOST_KEPT_OF_ONE:
            self._counters["prefixes.hints_unkept"] += 1
            return change.version
        hint = Hint(
            of=of, version=change.version, hash_tokens=change.hash_tokens, every=change.every, tags=tags
        )
        if told is None or not change.since:
            told = _Told(hint, owner)
        told.hint, told.whose = hint, owner
        self._put(key, told)
        if key[0] == HERE:  # nobody is told of others by us
            # Nobody knows a version before one that was told whole.
            self._remember(told, np.union1d(added, dropped) if change.since else NONE)
            self._wake()
        return change.version

    def _put(self, key: HintKey, told: _Told) -> None:
        self._told[key] = told
        self._kept.add(told.whose, len(told.hint.tags))
        self._touched += told.touched

    def _remember(self, told: _Told, touched: TagSet) -> None:
        self._touched -= told.touched
        told.remember(touched)
        if self._touched + told.touched > MOST_REMEMBERED:
            told.forget_changes()
        self._touched += told.touched

    def since(self, engine_id: str, of: str, version: int) -> HintChange | None:
        """What is new of an engine here to one who knows that version of it, 0 for none; None where nothing is."""
        told = self._told.get((HERE, engine_id))
        if told is None or told.hint.of != of or told.hint.version == version:
            return None
        hint = told.hint
        newer = [touched for number, touched in told.changes if number > version]
        # One of the changes that are remembered has to be known, else there were others before the first of them.
        if version and 0 < len(newer) < len(told.changes):
            touched = np.unique(np.concatenate(newer))
            there = member(touched, hint.tags)
            return _change(hint, version, touched[there], touched[~there])
        return _change(hint, 0, hint.tags, NONE)

    def drop(self, key: HintKey, of: str = "") -> None:
        """Forget what is known of one engine, or only of that generation (of one here: of that scheduler)."""
        told = self._told.get(key)
        if told is not None and of in ("", told.hint.of):
            del self._told[key]
            self._kept.add(told.whose, -len(told.hint.tags))
            self._touched -= told.touched

    def drop_all_at(self, endpoint: Endpoint, but: Mapping[str, str] | None = None) -> None:
        """Forget what another kvd told; not of the engines that are named, with their generations."""
        for key, told in list(self._told.items()):
            if key[0] == endpoint and (but or {}).get(key[1]) != told.hint.of:
                self.drop(key)

    # --- waiting for what is new ---

    def ask(self, route: bytes) -> HintQuestion:
        """A question of that connection begins. One of it that waits still is over: it gets what there is."""
        if (older := self._asking.get(route)) is not None:
            older.end()
        made = self._asking[route] = HintQuestion()
        if self._closed:
            made.end()
        return made

    def answered(self, route: bytes, asking: HintQuestion) -> None:
        """That question is over."""
        if self._asking.get(route) is asking:
            del self._asking[route]

    def close(self) -> None:
        """Nobody is to wait any more."""
        self._closed = True
        for asking in self._asking.values():
            asking.end()

    def _wake(self) -> None:
        for asking in self._asking.values():
            asking.change.set()


class HintQuestion:
    """A question that waits for a ``change`` of an engine here."""

    def __init__(self) -> None:
        self.over = False
        self.change = asyncio.Event()
        self._end = asyncio.Event()

    def end(self) -> None:
        """It is to wait no more."""
        self.over = True
        self._end.set()
        self.change.set()

    async def paused(self, seconds: float) -> None:
        """Wait so long, or for the end."""
        await _wait(self._end, seconds)

    async def woken(self, seconds: float) -> None:
        """Wait for a change since it was last looked for, so long at most."""
        await _wait(self.change, seconds)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _change(hint: Hint, since: int, added: TagSet, dropped: TagSet) -> HintChange:
    return HintChange(
        version=hint.version,
        since=since,
        hash_tokens=hint.hash_tokens,
        every=hint.every,
        added=packed(added),
        dropped=packed(dropped),
    )
