"""vLLM's prefix cache as peers read it: which blocks are complete, and whether they still hold what they held.

No reference is kept to any block. vLLM tells of each block that it is about to give to somebody
(`BlockPool.unpin_blocks`), and does so before the step that writes to it. So a block that was complete, and of which
nothing was told since, holds now what it held then.

vLLM's scheduling thread notes what is complete, any other thread looks things up. Each of them does one operation on a
dictionary at a time, and a look-up is made twice: blocks that it finds again, complete all the while, are those of the
prefix, whatever the other thread did meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvd.vllm.errors import UnsupportedBuild
from kvd.vllm.memory.groups import GroupFacts
from kvd.vllm.prefixes.boundaries import Boundaries, every

MOST_LOOKS = 8
"""Times that a shorter prefix is looked for where a block of a longer one is not complete."""


class WatchedBlock:
    """A block of one group, from its first request until vLLM gives it to another one.

    ``hash`` is what it holds, once that is computed. Peers are told of the prefix that ends with it if it is ``told``.
    """

    __slots__ = ("group", "hash", "told")

    def __init__(self, group: int) -> None:
        self.group = group
        self.hash: Any = None
        self.told = False


class HeldPrefix(NamedTuple):
    """``tokens`` of a prompt, in these blocks by group; ``entries`` say what each block held when it was found."""

    tokens: int
    ids: tuple[tuple[int, ...], ...]
    entries: tuple[tuple[Any, WatchedBlock], ...]


class PrefixCache:
    """One engine's. `look_up` and `holds` are called on any thread, all else in vLLM's step."""

    def __init__(self, manager: Any, groups: Sequence[GroupFacts], least: int = 1) -> None:
        """``manager`` is vLLM's KVCacheManager. Peers are told of a prefix each ``least`` tokens.

        Raises `UnsupportedBuild`.
        """
        self._coordinator, self._pool = manager.coordinator, manager.block_pool
        self._groups = tuple(groups)
        if not hasattr(self._pool, "unpin_blocks"):
            raise UnsupportedBuild(
                'prefixes is "on" and this vLLM does not tell when it gives a cached block away; leave it out, or use'
                " vLLM 0.32 or later"
            )
        self._watched: dict[int, WatchedBlock] = {}
        self._by_group = [0] * len(self._groups)
        self.boundaries = Boundaries(
            len(self._groups), self.hash_tokens, every(self._groups, self.hash_tokens, least)
        )

    @property
    def hash_tokens(self) -> int:
        """Tokens of a block that has a hash of its own."""
        return int(self._pool.hash_block_size)

    def __len__(self) -> int:
        """How many blocks are complete, on any thread."""
        return sum(self._by_group)

    @property
    def by_group(self) -> tuple[int, ...]:
        """The same, of each group."""
        return tuple(self._by_group)

    @property
    def pool_blocks(self) -> int:
        """Blocks that there are, of all groups and with nothing in them too."""
        return int(self._pool.num_gpu_blocks)

    def holders_of(self, block_hash: bytes) -> tuple[int, ...]:
        """For each group 1 if it holds a complete block of that hash; on any thread."""
        return tuple(int(self._is_held(block_hash, group)) for group in range(len(self._groups)))

    def _is_held(self, block_hash: bytes, group: int) -> bool:
        try:
            blocks = self._pool.get_cached_block(block_hash, [group])
        except (RuntimeError, StopIteration):  # the other thread changed what was being walked over
            return False
        return bool(blocks) and self._entry(blocks[0]) is not None

    def watch(self, blocks: Iterable[Any], group: int) -> list[WatchedBlock]:
        """Have vLLM tell when it gives these blocks of a group away, which somebody holds just now."""
        watched, new = [], []
        for block in blocks:
            one = self._watched.get(block.block_id)
            if one is None:
                one = self._watched[block.block_id] = WatchedBlock(group)
                new.append(block)
            watched.append(one)
        self._let_go(new)
        return watched

    def complete(self, block: Any, watched: WatchedBlock, end: int) -> None:
        """What is to stand in the block has been computed, if it has not been given away since it was watched.

        It is up to a prompt's ``end``-th token.
        """
        holds = block.block_hash
        if holds is None or holds == watched.hash or self._watched.get(block.block_id) is not watched:
            return
        if watched.hash is not None:
            # Whoever was told of it is to see that it holds something else now.
            self._forget(watched)
            watched = self._watched[block.block_id] = WatchedBlock(watched.group)
        watched.told = self.boundaries.add(holds, end)
        watched.hash = holds
        self._by_group[watched.group] += 1

    def look_up(self, hashes: list[bytes], beyond: int, most: int) -> HeldPrefix | None:
        """The longest prefix that is held here, of more than ``beyond`` and at most ``most`` tokens."""
        for _ in range(MOST_LOOKS):
            blocks, tokens = self._find(hashes, most)
            if tokens <= beyond:
                return None
            entries = [[self._entry(block) for block in group] for group in blocks]
            if (less := self._incomplete_from(blocks, entries, tokens)) is not None:
                most = less
                continue
            again, same = self._find(hashes, tokens)
            if same == tokens and _ids(again) == _ids(blocks):
                told = [
                    (block, entry)
                    for group, found in zip(blocks, entries, strict=True)
                    for block, entry in zip(group, found, strict=True)
                    if entry is not None
                ]
                return HeldPrefix(tokens, _ids(blocks), tuple(told))
        return None

    def holds(self, prefix: HeldPrefix) -> bool:
        """Whether the blocks held the prefix without a break since it was found."""
        return all(self._entry(block) is entry for block, entry in prefix.entries)

    def used(self, prefix: HeldPrefix) -> None:
        """It was read: vLLM is to give its blocks away later than others, as after a hit of its own."""
        free = [
            block for block, entry in prefix.entries if self._entry(block) is entry and block.ref_cnt == 0
        ]
        self._let_go(list(reversed(free)))

    def _find(self, hashes: list[bytes], most: int) -> tuple[list[list[Any]], int]:
        try:
            blocks, tokens = self._coordinator.find_longest_cache_hit(hashes, most)[:2]
        except (RuntimeError, StopIteration):  # the other thread changed what was being walked over
            return [], 0
        # Full attention may have more than the other groups.
        return [
            list(group[: -(-tokens // facts.block_size)])
            for group, facts in zip(blocks, self._groups, strict=True)
        ], tokens

    def _entry(self, block: Any) -> WatchedBlock | None:
        found, holds = self._watched.get(block.block_id), block.block_hash
        return found if found is not None and holds is not None and found.hash == holds else None

    def _incomplete_from(
        self, blocks: list[list[Any]], entries: list[list[WatchedBlock | None]], tokens: int
    ) -> int | None:
        """How many tokens to look for instead, where a block is not complete; None where all are."""
        for group, found, facts in zip(blocks, entries, self._groups, strict=True):
            for number, (block, entry) in enumerate(zip(group, found, strict=True)):
                if entry is None and not block.is_null:
                    whole = facts.kind in {"full", "mla"} and facts.window is None
                    return min(number * facts.block_size, tokens - 1) if whole else tokens - 1
        return None

    def _let_go(self, blocks: Iterable[Any]) -> None:
        held = list(blocks)
        self._pool.touch(held)
        self._pool.unpin_blocks(held, self._given_away)

    def _given_away(self, block: Any) -> None:
        """The block goes to somebody, or vLLM forgets all."""
        watched = self._watched.pop(block.block_id, None)
        if watched is not None and watched.hash is not None:
            self._forget(watched)

    def _forget(self, watched: WatchedBlock) -> None:
        self._by_group[watched.group] -= 1
        if watched.told:
            self.boundaries.remove(watched.hash)


def _ids(blocks: Sequence[Sequence[Any]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(block.block_id for block in group) for group in blocks)
