"""The holding side of prefixes: notes what this engine computes, and answers who asks for it.

What is asked is answered on the session's thread, which runs while vLLM's scheduler waits for its next request. What a
step computed is complete when its result is there: the next step notes it, or the end of its request.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvd.topology.blocks import offered
from kvd.vllm.builds.prefix_hashes import hashes_of
from kvd.vllm.memory.groups import GroupFacts
from kvd.vllm.prefixes.cache import HeldPrefix, PrefixCache, WatchedBlock
from kvd.vllm.prompt.parts import is_plain_text
from kvd.vllm.vllm_types import VllmRequest, VllmStep, processed_tokens
from kvd.wire.frame import Message
from kvd.wire.prefix import HASH_BYTES, CheckPrefix, FindPrefix, PrefixFound, PrefixKept
from kvd.wire.prefixes.cache import CacheGroup, CacheHeld, GetCache, LookedUp, LookUpTokens

MOST_TOLD, MOST_TOLD_BLOCKS = 4096, 1 << 19
"""Readers that may still come back with a `CheckPrefix`, and blocks that they were told of, 50 MB; of more the oldest
are told no."""
MOST_USED, USED_IN_A_STEP = 64, 4096
"""Prefixes that were read and not noted as used, of more the latest; and blocks that a step looks at for that."""


@dataclass(slots=True, eq=False)
class _Computed:
    """A request whose blocks are followed. ``tables`` are vLLM's own lists; of each ``seen`` blocks are watched.

    ``waiting`` are watched blocks: how many tokens have to be computed first, and the token behind their last one. A
    block that another request has as well may be computed by a step that is under way. So a token of the step that
    first showed it has to be computed too: steps end in their order.
    """

    request: VllmRequest
    tables: Sequence[Sequence[Any]] = ()
    seen: list[int] = field(default_factory=list)
    waiting: list[tuple[int, int, Any, WatchedBlock]] = field(default_factory=list)
    due: int = 0


class PrefixHolder:
    """One scheduler's. `answer` is called on the session's thread, all else in vLLM's step."""

    def __init__(
        self,
        cache: PrefixCache,
        groups: Sequence[GroupFacts],
        scheme: str,
        turns_down: Callable[[], bool],
    ) -> None:
        """``turns_down`` says whether this engine has no time to be read."""
        self.cache = cache
        self._turns_down = turns_down
        self._groups = tuple(groups)
        self._least = min(facts.block_size for facts in groups)
        self._scheme = scheme
        self._requests: dict[str, _Computed] = {}
        self._lock = threading.Lock()
        self._told: OrderedDict[str, list[HeldPrefix]] = OrderedDict()
        self._told_blocks = 0
        self._used: deque[HeldPrefix] = deque(maxlen=MOST_USED)

    def allocated(self, request: VllmRequest, tables: Sequence[Sequence[Any]]) -> None:
        """A request has blocks, in lists that show them as they are whenever they are looked at.

        One that was preempted comes with other lists, before a step computes any of it again.
        """
        known = self._requests.get(request.request_id)
        if known is not None and all(a is b for a, b in zip(known.tables, tables, strict=True)):
            return
        if is_plain_text(request):
            self._requests[request.request_id] = _Computed(request, tables, [0] * len(tables))

    def step(self, output: VllmStep) -> None:
        """A step is about to run: note what those before it completed, and watch what it will."""
        looked = 0
        while self._used and looked < USED_IN_A_STEP:
            used = self._used.popleft()
            self.cache.used(used)
            looked += len(used.entries)
        for request_id, count in output.num_scheduled_tokens.items():
            one = self._requests.get(request_id)
            if one is None:
                continue
            reached = one.request.num_computed_tokens + count
            if reached >= one.due or one.waiting:
                self._note_complete(one)
                self._watch(one, reached)

    def finished(self, request: VllmRequest) -> None:
        """A request ended; its blocks are still its own."""
        if (one := self._requests.pop(request.request_id, None)) is not None:
            self._note_complete(one)

    def _note_complete(self, one: _Computed) -> None:
        done = processed_tokens(one.request)
        waiting = []
        for due, end, block, watched in one.waiting:
            if due <= done:
                self.cache.complete(block, watched, end)
            else:
                waiting.append((due, end, block, watched))
        one.waiting = waiting

    def _watch(self, one: _Computed, reached: int) -> None:
        first = one.request.num_computed_tokens + 1
        for group, (facts, table) in enumerate(zip(self._groups, one.tables, strict=True)):
            full = min(reached // facts.block_size, len(table))
            new = [number for number in range(one.seen[group], full) if not table[number].is_null]
            watched = self.cache.watch([table[number] for number in new], group)
            for number, block in zip(new, watched, strict=True):
                end = (number + 1) * facts.block_size
                one.waiting.append((max(first, end), end, table[number], block))
            one.seen[group] = max(one.seen[group], full)
        one.due = (reached // self._least + 1) * self._least

    # --- on the session's thread ---

    def answer(self, message: Message) -> Message | None:
        """The answer to a question about prefixes; None for any other message."""
        if isinstance(message, FindPrefix):
            return self._find(message)
        if isinstance(message, CheckPrefix):
            return self._check(message)
        if isinstance(message, GetCache):
            return self._held()
        if isinstance(message, LookUpTokens):
            return self._look_up(message)
        return None

    def _held(self) -> CacheHeld:
        groups = zip(self._groups, self.cache.by_group, strict=True)
        return CacheHeld(
            groups=tuple(
                CacheGroup(kind=facts.kind, block_tokens=facts.block_size, blocks=blocks)
                for facts, blocks in groups
            ),
            pool=self.cache.pool_blocks,
            untold=self.cache.boundaries.untold,
        )

    def _look_up(self, asked: LookUpTokens) -> LookedUp:
        if asked.block_hash:
            return LookedUp(blocks=self.cache.holders_of(asked.block_hash))
        hashes = hashes_of(self._scheme, asked.tokens, self.cache.hash_tokens)
        found = self.cache.look_up(hashes, 0, len(asked.tokens))
        if found is None:
            return LookedUp()
        # Null blocks stand for what is outside of a window.
        held = tuple(sum(number != 0 for number in ids) for ids in found.ids)
        return LookedUp(tokens=found.tokens, blocks=held)

    def _find(self, asked: FindPrefix) -> PrefixFound:
        if asked.scheme != self._scheme or asked.hash_tokens != self.cache.hash_tokens:
            return PrefixFound()
        if self._turns_down():
            return PrefixFound(busy=True)
        whole = len(asked.hashes) // HASH_BYTES * HASH_BYTES
        hashes = [asked.hashes[at : at + HASH_BYTES] for at in range(0, whole, HASH_BYTES)]
        # vLLM makes a list of as many blocks as it is asked for, and takes it that each has a hash.
        most = min(asked.most, len(hashes) * asked.hash_tokens)
        found = self.cache.look_up(hashes, asked.beyond, most)
        if found is None:
            return PrefixFound()
        self._remember(asked.reader, found)
        self._used.append(found)
        lists = [offered(facts.kind, ids) for facts, ids in zip(self._groups, found.ids, strict=True)]
        return PrefixFound(
            tokens=found.tokens,
            blocks=tuple(tuple(one.ids.tolist()) for one in lists),
            first_blocks=tuple(one.first for one in lists),
        )

    def _remember(self, reader: str, found: HeldPrefix) -> None:
        """Note what a reader was told. It may be told twice, by way of two questions of its kvd, and read either."""
        with self._lock:
            self._told.setdefault(reader, []).append(found)
            self._told_blocks += len(found.entries)
            while len(self._told) > MOST_TOLD or self._told_blocks > MOST_TOLD_BLOCKS:
                _, oldest = self._told.popitem(last=False)
                self._told_blocks -= sum(len(one.entries) for one in oldest)

    def _check(self, asked: CheckPrefix) -> PrefixKept:
        with self._lock:
            told = tuple(self._told.get(asked.reader, ()))
        if not told:
            return PrefixKept(kept=False, reason="it knows of no such reader any more")
        if not all(self.cache.holds(found) for found in told):
            return PrefixKept(
                kept=False, reason="it needed blocks of the prefix for other requests meanwhile"
            )
        return PrefixKept(kept=True)
