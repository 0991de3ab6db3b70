"""Where prefixes end that this engine holds: what peers are told as hints (`kvd.wire.prefixes.hints`).

A prefix of some length is found only if each group holds the block that ends there: the last one of a window, the
state after it, the attention of its last tokens. So a *boundary* is a hash whose block every group holds. Of these
one is told for each so many tokens.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence

from kvd.vllm.memory.groups import GroupFacts
from kvd.wire.prefix import HASH_BYTES
from kvd.wire.prefixes.hints import MOST_TAGS, TAG_BYTES, HintChange


def every(groups: Sequence[GroupFacts], hash_tokens: int, least: int) -> int:
    """Of which blocks of ``hash_tokens`` a tag is told: one for each ``least`` tokens, where all groups may end.

    Of a window some block is told of, and of a state each: there may be one alone in a whole prompt.
    """
    unit = math.lcm(hash_tokens, *(facts.block_size for facts in groups))
    states = any(facts.kind == "mamba" for facts in groups)
    most = min([least, *(facts.window for facts in groups if facts.window is not None)])
    return unit // hash_tokens * (1 if states else max(1, most // unit))


class Boundaries:
    """Those of one engine. `change` and `taken` are called on the session's thread, all else on vLLM's.

    ``on_change`` is called there when something changed after all was told: in a step, or when the cache is reset.

    ``_held`` counts the blocks with a hash, by group. ``_touched`` has the hashes that came or went since the version
    that kvd is known to have, with the version that tells of them first. Versions up to ``_lost`` are of no use: what
    changed since them was forgotten.
    """

    def __init__(self, groups: int, hash_tokens: int, every_blocks: int) -> None:
        self._groups, self._hash_tokens, self._every = groups, hash_tokens, every_blocks
        self._step = every_blocks * hash_tokens
        self._lock = threading.Lock()
        self._held: dict[bytes, list[int]] = {}
        self._touched: dict[bytes, int] = {}
        self._version = self._known = self._lost = 0
        self.on_change: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        """Blocks that may be told of, on any thread."""
        return len(self._held)

    @property
    def untold(self) -> bool:
        """Whether kvd is not known to have been told of everything, on any thread."""
        return bool(self._touched) or not self._known

    def add(self, block_hash: bytes, end: int) -> bool:
        """A block that ends with a prompt's ``end``-th token is complete; its hash has its group behind it.

        Gives whether it is one of those that may be told of, of which `remove` is to hear.
        """
        if end % self._step:
            return False
        name, group = split(block_hash)
        with self._lock:
            if name not in self._held and len(self._held) >= MOST_TAGS:
                return False
            self._held.setdefault(name, [0] * self._groups)[group] += 1
            first = self._touch(name)
        if first:
            self.on_change()
        return True

    def remove(self, block_hash: bytes) -> None:
        """That block is given away."""
        name, group = split(block_hash)
        with self._lock:
            counts = self._held.get(name)
            if counts is None or not counts[group]:
                return
            counts[group] -= 1
            if not any(counts):
                del self._held[name]
            first = self._touch(name)
        if first:
            self.on_change()

    def _touch(self, name: bytes) -> bool:
        """Whether it is the first that kvd has to be told of."""
        first = not self._touched
        self._touched[name] = self._version + 1
        if len(self._touched) > MOST_TAGS:  # nobody takes it: all is told once somebody does
            self._touched.clear()
            self._known, self._lost = 0, self._version
        return first

    # --- on the session's thread ---

    def change(self) -> HintChange:
        """What changed since what kvd is known to have, or all."""
        with self._lock:
            self._version += 1
            names = self._touched if self._known else self._held
            added = [name for name in names if all(self._held.get(name, (0,)))]
            dropped = names.keys() - set(added) if self._known else ()
            return HintChange(
                version=self._version,
                since=self._known,
                hash_tokens=self._hash_tokens,
                every=self._every,
                added=_tags(added),
                dropped=_tags(dropped),
            )

    def taken(self, version: int) -> None:
        """That version is what kvd has; 0: it has none."""
        with self._lock:
            self._known = version if self._lost < version <= self._version else 0
            if self._known:
                self._touched = {name: since for name, since in self._touched.items() if since > version}


def split(block_hash: bytes) -> tuple[bytes, int]:
    """A block's hash, as vLLM keeps it, without its group, and the group."""
    return block_hash[:HASH_BYTES], int.from_bytes(block_hash[HASH_BYTES:])


def _tags(names: Iterable[bytes]) -> bytes:
    return b"".join(name[:TAG_BYTES] for name in names)
