"""What this kvd knows of what engines hold: of its own by what their schedulers tell, of others by their kvds.

All of it is out of date by some milliseconds or seconds. It says whom to ask, and nothing else. What is known of an
engine ends with its process, and with the link over which it came.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Mapping

import msgspec
import numpy as np

from kvd.service.prefixes.tags import NONE, PromptTags, TagSet, changed, longest, member, packed, unpacked
from kvd.wire.identity import HERE, Endpoint
from kvd.wire.prefixes.hints import MOST_TAGS, TAG_BYTES, HintChange

MOST_KEPT = 16 << 20
"""Tags of all engines together, 128 MiB: 256 hosts with eight full caches of a million tokens have half of it. Engines
beyond that are asked as if they told nothing."""
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
    """An engine's hint with the tags that each of the last changes touched."""

    hint: Hint
    changes: deque[tuple[int, TagSet]] = msgspec.field(default_factory=lambda: deque(maxlen=MOST_CHANGES))

    def remember(self, touched: TagSet) -> None:
        """The newest change touched these. Changes that are together more than all tags are of no use."""
        self.changes.append((self.hint.version, touched))
        while len(self.changes) > 1 and sum(len(one) for _, one in self.changes) > len(self.hint.tags):
            self.changes.popleft()


HintKey = tuple[Endpoint, str]


class Hints:
    """Of all engines that are known, by their kvd and their id; those here are at `HERE`."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._told: dict[HintKey, _Told] = {}
        self._kept = 0
        self._change, self._end = asyncio.Event(), asyncio.Event()

    @property
    def kept(self) -> int:
        """Tags that are known, of all engines."""
        return self._kept

    def rows(self) -> list[tuple[HintKey, Hint]]:
        """All of it."""
        return [(key, told.hint) for key, told in self._told.items()]

    def get(self, key: HintKey, of: str) -> Hint | None:
        """What is known of an engine, if it is of that generation (of one here: of that scheduler)."""
        told = self._told.get(key)
        return told.hint if told is not None and told.hint.of == of else None

    def take(self, key: HintKey, of: str, change: HintChange) -> int:
        """A change was told; gives the version that is known then, 0 if all has to be told.

        What makes no sense is counted, and what was known of the engine is dropped.
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
        room = MOST_KEPT - self._kept + (len(before.tags) if before is not None else 0)
        if len(tags) > room:
            self._counters["prefixes.hints_unkept"] += 1
            self.drop(key)
            return change.version
        hint = Hint(
            of=of, version=change.version, hash_tokens=change.hash_tokens, every=change.every, tags=tags
        )
        self._kept += len(tags) - (len(before.tags) if before is not None else 0)
        if told is None or not change.since:
            self._told[key] = _Told(hint)
        else:
            told.hint = hint
        if key[0] == HERE:  # nobody is told of others by us
            # Nobody knows a version before one that was told whole.
            self._told[key].remember(np.union1d(added, dropped) if change.since else NONE)
            self._wake()
        return change.version

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
            self._kept -= len(told.hint.tags)

    def drop_all_at(self, endpoint: Endpoint, but: Mapping[str, str] | None = None) -> None:
        """Forget what another kvd told; not of the engines that are named, with their generations."""
        for key, told in list(self._told.items()):
            if key[0] == endpoint and (but or {}).get(key[1]) != told.hint.of:
                self.drop(key)

    # --- waiting for what is new ---

    async def woken(self, seconds: float) -> None:
        """Wait for a change of an engine here, so long at most."""
        await _wait(self._change, seconds)

    async def paused(self, seconds: float) -> None:
        """Wait so long, or for the end."""
        await _wait(self._end, seconds)

    @property
    def closed(self) -> bool:
        """Whether nobody is to wait any more."""
        return self._end.is_set()

    def close(self) -> None:
        """Nobody is to wait any more."""
        self._end.set()
        self._change.set()

    def _wake(self) -> None:
        woken, self._change = self._change, asyncio.Event()
        woken.set()


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
