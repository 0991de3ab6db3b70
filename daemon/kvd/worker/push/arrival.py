"""One pushed load: what is to arrive from whom, what has arrived, and who may still be writing.

Pure bookkeeping. Progress may come in any order and any number of times; what belongs to an older attempt is no part of
it any more.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from kvd.geometry.model import WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.topology.blocks import BlockList, window_start
from kvd.topology.copies import Copies
from kvd.topology.pairing import read_pairs
from kvd.topology.plan import Plan
from kvd.topology.reads import Read
from kvd.wire.push import PushKey, PushProgress
from kvd.wire.transfer import BlockRuns, TransferRecord
from kvd.worker.cause import Cause
from kvd.worker.load import Load
from kvd.worker.records import moments, with_other

Part = tuple[Rank, str]
"""A layer, as far as that worker of the prefiller supplies it."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a request's blocks take from a peer: its parts, and how much they are together."""

    parts: frozenset[Part]
    bytes: int
    descriptors: int

    @property
    def sources(self) -> frozenset[Rank]:
        """The prefiller's workers that write for this request."""
        return frozenset(source for source, _ in self.parts)


class ArrivalPhase(enum.Enum):
    """How far an arrival is. `AFTER` says what may come next."""

    WAITING = "waiting"
    """To be announced, at its ``due``. Nothing of it can land."""
    ANNOUNCED = "announced"
    """Its prefiller may know of it, and may write."""
    TAKEN = "taken"
    """Its prefiller has said that it knows of it."""
    UNWANTED = "unwanted"
    """Given up before it was announced: nothing of it can land."""
    WITHDRAWN = "withdrawn"
    """Given up after it was announced: its sources may write until each has said that it does not."""


AFTER: Mapping[ArrivalPhase, frozenset[ArrivalPhase]] = {
    ArrivalPhase.WAITING: frozenset({ArrivalPhase.ANNOUNCED, ArrivalPhase.UNWANTED}),
    ArrivalPhase.ANNOUNCED: frozenset({ArrivalPhase.TAKEN, ArrivalPhase.WAITING, ArrivalPhase.WITHDRAWN}),
    ArrivalPhase.TAKEN: frozenset({ArrivalPhase.WAITING, ArrivalPhase.WITHDRAWN}),
    ArrivalPhase.UNWANTED: frozenset(),
    ArrivalPhase.WITHDRAWN: frozenset(),
}
"""The phases that may follow each. Back to waiting goes what was on a window that is closed."""


@dataclass(slots=True, eq=False)
class Arrival:
    """A pushed load on its way; only its own methods change it. Times are time.monotonic() seconds, 0 for never.

    ``key`` names it to the prefiller, with the attempt of now. ``announced`` is when it was first announced, ``began``
    since when it is to be, ``due`` when it next is, ``tries`` how often it was. ``left`` is what has not arrived,
    ``quiesced`` who has said that none of its writes is under way. With a ``cause`` it is given up, and is reported
    when nothing of it can land any more; ``withdrawn`` is since when its sources are awaited, minus infinity where one
    will not say it. ``reached``, ``reading``, ``copies`` and ``backend`` are of what this side reads by itself: up to
    which token a part was asked for, the reads under way, what those that ended copied, and what moves their bytes.
    ``remote_blocks`` are the prefiller's, as it says once it has sent all.
    """

    load: Load
    plan: Plan
    expected: Expected
    key: PushKey
    phase: ArrivalPhase = ArrivalPhase.WAITING
    left: set[Part] = field(default_factory=set)
    quiesced: set[Rank] = field(default_factory=set)
    cause: Cause | None = None
    announced: float = 0.0
    taken: float = 0.0
    first: float = 0.0
    last: float = 0.0
    due: float = 0.0
    began: float = 0.0
    withdrawn: float = 0.0
    tries: int = 0
    backend: str = ""
    remote_blocks: tuple[BlockRuns, ...] = ()
    reached: dict[Part, int] = field(default_factory=dict)
    reading: set[Load] = field(default_factory=set)
    copies: list[Copies] = field(default_factory=list)

    @property
    def exposed(self) -> bool:
        """Whether a source may write of its attempt of now."""
        return self.phase not in (ArrivalPhase.WAITING, ArrivalPhase.UNWANTED)

    @property
    def silent(self) -> bool:
        """Whether no source writes any more: each has said so, or has nothing left to write."""
        return not self.left or self.expected.sources <= self.quiesced

    def sent(self, attempt: int, now: float) -> None:
        """It is announced, as that attempt."""
        self._go(ArrivalPhase.ANNOUNCED)
        self.key = msgspec.structs.replace(self.key, attempt=attempt)
        self.announced = self.announced or now
        self.tries += 1
        self.due = math.inf

    def put_off(self, due: float) -> None:
        """It cannot be announced before then."""
        self.due = due

    def reannounce(self, now: float) -> None:
        """To be announced, from nothing: whatever has arrived is written again, and what was said so far is over."""
        if self.phase is not ArrivalPhase.WAITING:
            self._go(ArrivalPhase.WAITING)
        if self.announced:
            self.key = msgspec.structs.replace(self.key, attempt=self.key.attempt + 1)
        self.left, self.quiesced = set(self.expected.parts), set()
        self.taken = self.first = self.last = 0.0
        self.due = self.began = now

    def give_up(self, cause: Cause) -> None:
        """It is to be a miss, once nothing of it can land any more; reads that are not posted yet will not be."""
        self._go(ArrivalPhase.WITHDRAWN if self.exposed else ArrivalPhase.UNWANTED)
        self.cause, self.withdrawn = cause, time.monotonic()
        for load in self.reading:
            load.drop(cause)

    def never_quiesces(self) -> None:
        """A source cannot tell what may still land: only the window's end can."""
        self.withdrawn = -math.inf

    def acknowledged(self, now: float) -> None:
        """The prefiller knows of it."""
        if self.phase is ArrivalPhase.ANNOUNCED:
            self._go(ArrivalPhase.TAKEN)
        self.taken = self.taken or now

    def note_sent(self, progress: PushProgress) -> None:
        """What a source says of all that it sent."""
        self.remote_blocks = progress.blocks or self.remote_blocks
        self.load.sums = self.load.sums or progress.sums

    def mark_received(self, source: Rank, layers: tuple[str, ...], now: float) -> None:
        """These layers have arrived from that worker."""
        here = self.left.intersection((source, layer) for layer in layers)
        if here:
            self.left -= here
            self.first = self.first or now
            self.last = now

    def mark_quiesced(self, source: Rank) -> None:
        """That worker has said that none of its writes is under way."""
        self.quiesced.add(source)

    def begin_read(self, read: Load, reached: Mapping[Part, int]) -> None:
        """This side reads by itself: those parts up to these tokens."""
        self.reached.update(reached)
        self.reading.add(read)

    def end_read(self, read: Load) -> None:
        """A read of this side has ended."""
        self.reading.discard(read)
        self.copies += read.pieces.copies
        self.backend = next((t.backend for t in read.pieces.transfers if t.backend), "")

    def struck(self, geometry: WorkerGeometry) -> Cause | None:
        """Why it is to be given up now, where its load is to miss on an operator's order."""
        fault = self.load.fault
        if fault is None:
            return None
        if fault.when == "flight":
            due = self.phase is ArrivalPhase.TAKEN
        elif missing := fault.withheld(geometry):
            due = all(layer in missing for _, layer in self.left)
        else:
            due = bool(self.first)
        return fault.cause if due or not self.left else None

    def _go(self, phase: ArrivalPhase) -> None:
        if phase not in AFTER[self.phase]:
            raise RuntimeError(
                f"transfer {self.key.transfer_id} is {self.phase.value} and cannot be {phase.value}"
            )
        self.phase = phase


def expect(plan: Plan, blocks: Mapping[int, BlockList], tokens: int) -> Expected:
    """What a request takes from each worker of a peer, whatever blocks it has there.

    A read that finds no blocks to fill expects nothing: those outside the window, and groups that need none.
    """
    parts: set[Part] = set()
    nbytes = descriptors = 0
    for read, count in _needed(plan, blocks, tokens):
        source = plan.remote_ranks[read.remote]
        parts.update((source, layer) for layer in read.layers)
        nbytes += count * read.bytes_per_block
        descriptors += count * len(read.layers) * read.layer_segments
    return Expected(frozenset(parts), nbytes, descriptors)


def record_arrival(arrival: Arrival, record: TransferRecord) -> TransferRecord:
    """The record of its load, with what is known of the arrival."""
    order, expected = arrival.load.order, arrival.expected
    return msgspec.structs.replace(
        record,
        backend=arrival.backend or record.backend,
        tokens=order.tokens - order.computed,
        bytes=expected.bytes,
        descriptors=expected.descriptors,
        coalesced_descriptors=sum(copies.runs for copies in arrival.copies),
        remote_ranks=tuple(sorted(str(rank) for rank in expected.sources)),
        stages=with_other(arrival.load, _stages(arrival)),
        attempts=arrival.tries,
        remote_blocks=arrival.remote_blocks,
        moments=moments(
            arrival.load,
            announced=arrival.announced,
            taken=arrival.taken,
            first=arrival.first,
            last=arrival.last,
        ),
    )


def _stages(arrival: Arrival) -> dict[str, float]:
    """Seconds in each stage, one after the other; of a miss the last one lasts until its end."""
    load, ended = arrival.load, arrival.load.times.ended
    announced = arrival.announced or ended
    taken = max(announced, arrival.taken or ended)
    first = max(taken, arrival.first or ended)
    last = max(first, ended if arrival.left else arrival.last)
    return {
        "queued": max(0.0, load.times.received - load.order.claimed),
        "handshake": load.times.handshake_seconds + load.order.handshake_seconds,
        "announce": taken - announced,
        "wait": first - taken,
        "wire": last - first,
    }


def _needed(plan: Plan, blocks: Mapping[int, BlockList], tokens: int) -> Iterator[tuple[Read, int]]:
    """Reads with the number of their block pairs, where there are any."""
    for read in plan.reads:
        local = blocks.get(read.group)
        if local is None or not len(local.ids):
            continue
        pairs, _ = read_pairs(plan, read, local, _anything(plan, read, local, tokens), tokens)
        if len(pairs):
            yield read, len(pairs)


def _anything(plan: Plan, read: Read, local: BlockList, tokens: int) -> BlockList:
    """A peer's blocks of one group, all that a request can need: only their numbers mean anything."""
    if read.kind == "mamba":
        return local
    size = plan.remote_block_sizes[read.remote_group]
    first = 0
    if read.window is not None:
        first = max(0, window_start(read.kind, read.window, tokens)) // size
    return BlockList(first, np.arange(first, -(-tokens // size) + read.phase.remote_period, dtype=np.int64))
