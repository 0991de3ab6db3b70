"""One decoding worker's part of one transfer, as the prefilling worker sends it: what is written, posted, and told."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from kvd.backends.contract import Lane, Transfer
from kvd.client.records import block_runs
from kvd.geometry.rank import Rank
from kvd.topology.blocks import BlockList
from kvd.topology.descriptors import Descriptors, concatenate
from kvd.topology.push import LayerPush, compile_chunk, sendable
from kvd.wire.push import BlockRun, LayersThere, PushAnnounce, PushKey, PushProgress
from kvd.wire.transfer import MAX_RUNS, BlockRuns
from kvd.worker.cause import Cause, code_of, text_of
from kvd.worker.push.computed import Computed

MOST_FLYING = 4
"""Most posts of one target under way: what becomes ready meanwhile goes into the next one together."""
READS_END = 4.0
"""Seconds within which a decoder that reads by itself has heard that it must not any more."""
MOST_BYTES = 64 << 20
"""Bytes after which a post takes no further layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One post: which layers it completes up to which token, read in which epoch of the request's blocks."""

    transfer: Transfer
    layers: dict[str, int]
    epoch: int
    lane: Lane


@dataclass(slots=True, eq=False)
class Target:
    """One announcement with what became of it.

    ``posted`` and ``sent`` are tokens by layer, under way and certainly written (or, where the decoder reads by itself,
    told of). ``unheard`` are those of which the decoder has not confirmed to know. ``closing`` is since when nothing
    more is posted, ``cause`` why it failed. ``dirty``: bytes may land as long as its window is open.
    ``source`` are the prefiller's blocks as they were posted last, by its groups.
    ``looked`` is what was computed when nothing of it was left to be posted.
    ``settled`` is since when nothing is read for it and nothing will be, ``released`` that its blocks are not needed.
    ``sums``: its KV is added up.
    """

    announce: PushAnnounce
    deadline: float
    pushes: Mapping[str, LayerPush] | None = None
    posted: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    flying: list[Piece] = field(default_factory=list)
    looked: Computed | None = None
    failures: int = 0
    epoch: int | None = None
    source: dict[int, BlockList] = field(default_factory=dict)
    unheard: dict[str, int] = field(default_factory=dict)
    news: bool = False
    closing: float | None = None
    withdrawn: bool = False
    cause: Cause | None = None
    dirty: bool = False
    settled: float | None = None
    released: bool = False
    sums: bool = False
    blocks: dict[int, BlockList] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """``blocks`` are the decoder's, by its groups."""
        self.blocks = {
            run.group: BlockList(run.first, np.array(run.ids, np.int64)) for run in self.announce.blocks
        }

    @property
    def key(self) -> PushKey:
        """Whose part of which transfer."""
        return self.announce.key

    @property
    def direct(self) -> bool:
        """Whether the decoder reads by itself."""
        return not self.announce.landing

    @property
    def peer(self) -> str:
        """The name of the window on a lane: another window of the same worker has another name."""
        mark = hashlib.blake2b(self.announce.landing, digest_size=8).hexdigest()
        return f"{self.key.rank}#{mark}"

    @property
    def complete(self) -> bool:
        """Whether all that this worker supplies was written."""
        total = self.announce.tokens
        return self.pushes is not None and all(self.sent.get(name) == total for name in self.pushes)

    @property
    def all_posted(self) -> bool:
        """Whether all that this worker supplies is under way or written."""
        total = self.announce.tokens
        return self.pushes is not None and all(self.posted.get(name) == total for name in self.pushes)

    @property
    def over(self) -> bool:
        """Whether there is nothing left to do for it, unless the decoder says more."""
        return self.released and not self.news


def same(announce: PushAnnounce, other: PushAnnounce) -> bool:
    """Whether two messages announce the same thing, whatever time is left."""
    return msgspec.structs.replace(announce, seconds=0.0) == msgspec.structs.replace(other, seconds=0.0)


def due(target: Target, computed: Computed) -> dict[str, int]:
    """Layers of which more can be sent than was posted, and up to which token."""
    total = target.announce.tokens
    ends = {
        name: sendable(push, reached=computed.reached(name), total=total)
        for name, push in (target.pushes or {}).items()
        if push.source_group in computed.blocks  # a state's block is known last
    }
    return {name: end for name, end in ends.items() if end > target.posted.get(name, 0)}


def next_piece(
    target: Target, computed: Computed, ends: Mapping[str, int]
) -> tuple[dict[str, int], Descriptors]:
    """As many of the layers that are due as fit into one post, with what to write. Raises `TopologyError`."""
    layers: dict[str, int] = {}
    rows: list[Descriptors] = []
    size = 0
    for name, end in ends.items():
        push = (target.pushes or {})[name]
        found = compile_chunk(
            push,
            computed.blocks,
            target.blocks,
            total=target.announce.tokens,
            first=target.posted.get(name, 0),
            last=end,
        )
        layers[name] = end
        rows.append(found)
        size += found.nbytes
        if size >= MOST_BYTES:
            break
    return layers, concatenate([part for part in rows if len(part)])


def written(target: Target, layers: Mapping[str, int]) -> None:
    """These layers are written up to these tokens; the decoder is told of those that are whole."""
    target.sent.update(layers)
    for name, end in layers.items():
        if end == target.announce.tokens:
            target.unheard[name] = end
            target.news = True


def readable(target: Target, computed: Computed, ends: Mapping[str, int]) -> None:
    """The decoder may read these layers up to these tokens, from the blocks that are the request's now."""
    target.posted.update(ends)
    target.sent.update(ends)
    target.unheard.update(ends)
    target.source = computed.blocks
    target.news = True


def lost(target: Target) -> None:
    """Whatever is under way will not be waited for: it is to be posted again."""
    target.flying.clear()
    target.posted = dict(target.sent)
    target.looked = None


def progress(target: Target, source: Rank) -> PushProgress:
    """What the decoder has not heard of yet."""
    by_group: dict[tuple[int, int, int], list[str]] = {}
    for name, tokens in target.unheard.items():
        push = (target.pushes or {})[name]
        by_group.setdefault((push.group, push.source_group, tokens), []).append(name)
    over = target.settled is not None
    return PushProgress(
        key=target.key,
        source=source,
        there=tuple(
            LayersThere(
                group=group,
                layers=tuple(names),
                tokens=tokens,
                blocks=_run(target, source_group) if target.direct else None,
            )
            for (group, source_group, tokens), names in by_group.items()
        ),
        failed=text_of(target.cause) if over else "",
        code=code_of(target.cause) if over else "",
        quiet=over and not target.dirty and (target.withdrawn or bool(target.cause)),
        blocks=_source_runs(target),
        sums=target.sums and target.complete,
    )


def release_at(target: Target) -> float:
    """When its blocks may be overwritten: a decoder that reads by itself has to hear first that it must not."""
    if target.settled is None or target.released:
        return math.inf
    reads = target.direct and bool(target.cause) and not target.withdrawn
    return target.settled + READS_END if reads else target.settled


def expired(target: Target, now: float, keep: float) -> bool:
    """Whether a target that has ended need not be remembered any more."""
    return target.settled is not None and now > max(target.settled, target.deadline) + keep


def settle(target: Target) -> None:
    """Nothing is read for it and nothing will be; whoever waits for that word is told, where it means anything."""
    target.settled, target.looked = time.monotonic(), None
    target.news = target.news or bool(target.cause) or (target.withdrawn and not target.dirty)


def _run(target: Target, group: int) -> BlockRun | None:
    blocks = target.source.get(group)
    return None if blocks is None else BlockRun(group, blocks.first, tuple(blocks.ids.tolist()))


def _source_runs(target: Target) -> tuple[BlockRuns, ...]:
    """Where it was written from, for the decoder's record; only once, and not where that would be long."""
    if not target.complete:
        return ()
    runs = block_runs(target.source)
    return runs if sum(len(part.runs) for part in runs) <= MAX_RUNS else ()


def nothing(key: PushKey) -> PushAnnounce:
    """Stands for an announcement that was withdrawn before it came."""
    return PushAnnounce(
        key=key, generations=("", ""), tokens=0, computed=0, blocks=(), landing=b"", seconds=0.0
    )
