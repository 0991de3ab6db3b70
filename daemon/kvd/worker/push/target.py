"""One decoding worker's part of one transfer, as the prefilling worker sends it: what is written, posted, and told."""

from __future__ import annotations

import enum
import hashlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from kvd.backends.contract import Lane, Transfer
from kvd.client.records import block_runs
from kvd.geometry.rank import Rank
from kvd.shown import logger
from kvd.topology.blocks import BlockList
from kvd.topology.descriptors import Descriptors, concatenate
from kvd.topology.push import LayerPush, compile_chunk, sendable
from kvd.wire.push import LayersThere, PushAnnounce, PushKey, PushProgress, SentPart
from kvd.wire.transfer import MAX_RUNS, BlockRuns
from kvd.worker.cause import Cause, code_of, text_of
from kvd.worker.push.milestones import Computed
from kvd.worker.push.sent_blocks import received_blocks, sent_blocks

log = logger(__name__)

MOST_FLYING = 4
"""Most posts of one target under way: what becomes ready meanwhile goes into the next one together."""
READS_END = 4.0
"""Seconds within which a decoder that reads by itself has heard that it must not any more."""
KEEP = 120.0
"""Seconds for which a target is remembered after its end: its messages may come again."""
MOST_TARGETS = 8192
Name = tuple[str, Rank]
"""A transfer's id and the decoding worker."""
MOST_BYTES = 64 << 20
"""Bytes after which a post takes no further layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Post:
    """One post: which layers it completes up to which token, read in which epoch of the request's blocks."""

    transfer: Transfer
    layers: dict[str, int]
    epoch: int
    lane: Lane


class TargetPhase(enum.IntEnum):
    """How far a target is from its end. `AFTER` says what may come next; it only goes forward."""

    SENDING = 0
    """What is computed is posted."""
    CLOSING = 1
    """Nothing more is posted, and what is under way is awaited."""
    SETTLED = 2
    """Nothing is read for it and nothing will be; whoever waits for that word is told."""
    RELEASED = 3
    """Its blocks are not needed."""


AFTER: Mapping[TargetPhase, frozenset[TargetPhase]] = {
    TargetPhase.SENDING: frozenset({TargetPhase.CLOSING, TargetPhase.SETTLED}),
    TargetPhase.CLOSING: frozenset({TargetPhase.SETTLED}),
    TargetPhase.SETTLED: frozenset({TargetPhase.RELEASED}),
    TargetPhase.RELEASED: frozenset(),
}
"""The phases that may follow each. At once to settled goes what is written, or what the decoder needs no more of."""


@dataclass(slots=True, eq=False)
class PushTarget:
    """One announcement with what became of it.

    ``posted`` and ``sent`` are tokens by layer, under way and certainly written (or, where the decoder reads by itself,
    told of). ``unacknowledged`` are those of which the decoder has not confirmed to know. ``since`` is when it was
    closed, or settled, in time.monotonic() seconds; ``cause`` is why it failed. ``withdrawn``: the decoder wants no
    more of it. ``dirty``: bytes may land as long as its window is open. ``source`` are the prefiller's blocks as they
    were posted last, by its groups. ``looked`` is what was computed when nothing of it was left to be posted. ``news``:
    the decoder is to be told something. ``sums``: its KV is added up. ``opened``: see `blocks`. ``request_id`` and
    ``traceparent`` are of the prefiller's request. It was announced at ``began``; ``first`` and ``last`` are when
    something was sent (time.monotonic(), 0 before that). ``traced``: kvd was told of these.
    """

    announce: PushAnnounce
    deadline: float
    pushes: Mapping[str, LayerPush] | None = None
    posted: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    flying: list[Post] = field(default_factory=list)
    looked: Computed | None = None
    failures: int = 0
    epoch: int | None = None
    source: dict[int, BlockList] = field(default_factory=dict)
    unacknowledged: dict[str, int] = field(default_factory=dict)
    news: bool = False
    phase: TargetPhase = TargetPhase.SENDING
    since: float = 0.0
    withdrawn: bool = False
    cause: Cause | None = None
    dirty: bool = False
    sums: bool = False
    opened: dict[int, BlockList] = field(default_factory=dict)
    request_id: str = ""
    traceparent: str = ""
    began: float = field(default_factory=time.monotonic)
    first: float = 0.0
    last: float = 0.0
    traced: bool = False

    @property
    def blocks(self) -> dict[int, BlockList]:
        """The decoder's blocks, by its groups. Few bytes may name many of them, so they are made when they are used."""
        if not self.opened:
            self.opened = {sent.group: received_blocks(sent) for sent in self.announce.blocks}
        return self.opened

    @property
    def key(self) -> PushKey:
        """Whose part of which transfer."""
        return self.announce.key

    @property
    def direct(self) -> bool:
        """Whether the decoder reads by itself."""
        return not self.announce.window

    @property
    def peer(self) -> str:
        """The name of the window on a lane: another window of the same worker has another name."""
        mark = hashlib.blake2b(self.announce.window, digest_size=8).hexdigest()
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
        """Whether nothing is left to do for it. It begins again if the decoder says more."""
        return self.phase is TargetPhase.RELEASED and not self.news

    def close(self, cause: Cause | None = None) -> None:
        """Post nothing more of it; with a ``cause`` it has failed, and the decoder hears so once it is settled."""
        if self.phase is not TargetPhase.SENDING:
            return
        self._go(TargetPhase.CLOSING)
        self.since, self.cause = time.monotonic(), cause
        if cause is not None:
            key = self.key
            log.warning("push of %s to %s/%s is given up: %s", key.transfer_id, key.decoder, key.rank, cause)

    def withdraw(self) -> None:
        """The decoder wants no more of it; one that hears that of a settled target is told again what became of it."""
        self.withdrawn = True
        self.news = self.news or self.phase >= TargetPhase.SETTLED
        self.close()

    def settle(self) -> None:
        """Nothing is read for it and nothing will be; whoever waits for that word is told, where it means anything."""
        if self.phase < TargetPhase.SETTLED:
            self._go(TargetPhase.SETTLED)
        self.since, self.looked = time.monotonic(), None
        self.news = self.news or bool(self.cause) or (self.withdrawn and not self.dirty)

    def release(self) -> None:
        """Its blocks are not needed; nothing may be read for it any more."""
        if self.phase is not TargetPhase.RELEASED:
            self._go(TargetPhase.RELEASED)
        self.opened = {}

    def lose_posts(self) -> None:
        """Whatever is under way will not be waited for: it is to be posted again."""
        self.flying.clear()
        self.posted = dict(self.sent)
        self.looked = None

    def _go(self, phase: TargetPhase) -> None:
        if phase not in AFTER[self.phase]:
            is_now, wanted = self.phase.name.lower(), phase.name.lower()
            raise RuntimeError(f"the push of {self.key.transfer_id} is {is_now} and cannot be {wanted}")
        self.phase = phase


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A decoding worker has been told how far these layers are; ``nobody``: it waits for nothing any more."""

    target: PushTarget
    layers: dict[str, int]
    nobody: bool


@dataclass(frozen=True, slots=True)
class DecoderAnswered:
    """kvd was asked for this generation: the decoder is registered, or ``cause`` says why not."""

    generation: str
    cause: Cause | None = None


def note_acknowledged(item: Acknowledged) -> None:
    """Take note of what a decoding worker has heard."""
    for name, tokens in item.layers.items():
        if item.target.unacknowledged.get(name) == tokens:
            del item.target.unacknowledged[name]
    if item.nobody and item.target.phase is TargetPhase.SENDING:
        item.target.withdraw()


def same(announce: PushAnnounce, other: PushAnnounce) -> bool:
    """Whether two messages announce the same thing, whatever time is left."""
    return msgspec.structs.replace(announce, seconds=0.0) == msgspec.structs.replace(other, seconds=0.0)


def due(target: PushTarget, computed: Computed) -> dict[str, int]:
    """Layers of which more can be sent than was posted, and up to which token."""
    total = target.announce.tokens
    ends = {
        name: sendable(push, reached=computed.reached(name), total=total)
        for name, push in (target.pushes or {}).items()
        if push.source_group in computed.blocks  # a state's block is known last
    }
    return {name: end for name, end in ends.items() if end > target.posted.get(name, 0)}


def next_post(
    target: PushTarget, computed: Computed, ends: Mapping[str, int]
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


def written(target: PushTarget, layers: Mapping[str, int]) -> None:
    """These layers are written up to these tokens; the decoder is told of those that are whole."""
    target.sent.update(layers)
    _note_sent(target)
    for name, end in layers.items():
        if end == target.announce.tokens:
            target.unacknowledged[name] = end
            target.news = True


def readable(target: PushTarget, computed: Computed, ends: Mapping[str, int]) -> None:
    """The decoder may read these layers up to these tokens, from the blocks that are the request's now."""
    target.posted.update(ends)
    target.sent.update(ends)
    target.unacknowledged.update(ends)
    target.source = computed.blocks
    target.news = True
    _note_sent(target)


def progress(target: PushTarget, source: Rank) -> PushProgress:
    """What the decoder has not heard of yet."""
    by_group: dict[tuple[int, int, int], list[str]] = {}
    for name, tokens in target.unacknowledged.items():
        push = (target.pushes or {})[name]
        by_group.setdefault((push.group, push.source_group, tokens), []).append(name)
    over = target.phase >= TargetPhase.SETTLED
    blocks = sent_blocks(target.source) if target.direct else {}
    return PushProgress(
        key=target.key,
        source=source,
        there=tuple(
            LayersThere(
                group=group,
                layers=tuple(names),
                tokens=tokens,
                blocks=blocks.get(source_group),
            )
            for (group, source_group, tokens), names in by_group.items()
        ),
        failed=text_of(target.cause) if over else "",
        code=code_of(target.cause) if over else "",
        quiesced=over and not target.dirty and (target.withdrawn or bool(target.cause)),
        blocks=_source_runs(target),
        sums=target.sums and target.complete,
        sent=_sent_part(target),
    )


def _note_sent(target: PushTarget) -> None:
    target.last = time.monotonic()
    target.first = target.first or target.last


def _sent_part(target: PushTarget) -> SentPart | None:
    """What the spans of this worker's kvd are made of; once, with the last that there is to tell."""
    over = target.complete or target.phase >= TargetPhase.SETTLED
    if not target.traceparent or target.traced or not over:
        return None
    target.traced = True
    now = time.monotonic()
    times = {"first": target.first, "last": target.last, "ended": now}
    return SentPart(
        traceparent=target.traceparent,
        request_id=target.request_id,
        started=time.time() - (now - target.began),
        moments={name: at - target.began for name, at in times.items() if at},
    )


def release_at(target: PushTarget) -> float:
    """When its blocks may be overwritten: a decoder that reads by itself has to hear first that it must not."""
    if target.phase is not TargetPhase.SETTLED:
        return math.inf
    reads = target.direct and bool(target.cause) and not target.withdrawn
    return target.since + READS_END if reads else target.since


def forgettable(targets: Mapping[Name, PushTarget], now: float) -> list[Name]:
    """Targets that have ended and need not be remembered any more; of too many those that settled, whenever it was."""
    over = [name for name, target in targets.items() if _expired(target, now)]
    spare = len(targets) - len(over) - MOST_TARGETS
    if spare > 0:
        settled = (name for name, target in targets.items() if target.phase >= TargetPhase.SETTLED)
        over = list(dict.fromkeys([*over, *islice(settled, spare)]))
    return over


def _expired(target: PushTarget, now: float) -> bool:
    return target.phase >= TargetPhase.SETTLED and now > max(target.since, target.deadline) + KEEP


def _source_runs(target: PushTarget) -> tuple[BlockRuns, ...]:
    """Where it was written from, for the decoder's record; only once, and not where that would be long."""
    if not target.complete:
        return ()
    runs = block_runs(target.source)
    return runs if sum(len(part.runs) for part in runs) <= MAX_RUNS else ()


def of_another_host(key: PushKey, targets: Mapping[Name, PushTarget]) -> bool:
    """Whether a decoder of the same id on another host has that transfer: kvd has made sure of which host speaks."""
    target = targets.get((key.transfer_id, key.rank))
    if target is None or target.key.decoder_endpoint == key.decoder_endpoint:
        return False
    log.warning(
        "push of %s is %s's, not %s's", key.transfer_id, target.key.decoder_endpoint, key.decoder_endpoint
    )
    return True


def nothing(key: PushKey) -> PushAnnounce:
    """Stands for an announcement that was withdrawn before it came."""
    return PushAnnounce(
        key=key, generations=("", ""), tokens=0, computed=0, blocks=(), window=b"", seconds=0.0
    )
