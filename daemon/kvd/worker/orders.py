"""What the scheduler's half tells the workers in one step, and what they answer: plain data that pickles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvd.geometry.model import WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.topology.blocks import BlockList
from kvd.topology.columns import column_of
from kvd.worker.cause import Cause
from kvd.worker.remote import RemotePrefill

Blocks = tuple[int, tuple[int, ...]]
"""(first, ids) of a `BlockList`, in a form that crosses processes cheaply."""


def plain(lists: Mapping[int, BlockList]) -> dict[int, Blocks]:
    """Blocks by group index, to be sent to workers."""
    return {index: (blocks.first, tuple(blocks.ids.tolist())) for index, blocks in lists.items()}


def block_lists(groups: Mapping[int, Blocks]) -> dict[int, BlockList]:
    """What `plain` was given."""
    return {index: BlockList(first=first, ids=column_of(ids)) for index, (first, ids) in groups.items()}


@dataclass(frozen=True, slots=True)
class Fault:
    """How a load is to miss on an operator's order; ``cause`` says whose.

    ``before``: nothing of it is read. ``flight``: given up once it is under way. ``layers``: given up when a part has
    arrived; with a ``group`` or ``layer`` when all else has. With a ``rank`` only that worker's part misses.
    """

    cause: Cause
    when: Literal["before", "flight", "layers"]
    rank: Rank | None = None
    group: int | None = None
    layer: str = ""

    def concerns(self, geometry: WorkerGeometry) -> bool:
        """Whether a worker's part of the load is to miss: it has that rank, and holds that layer or group."""
        if self.rank not in (None, geometry.rank):
            return False
        named = self.group is not None or bool(self.layer)
        return not named or bool(self.withheld(geometry))

    def withheld(self, geometry: WorkerGeometry) -> frozenset[str]:
        """The layers that are not to arrive on a worker."""
        return frozenset(
            layer.name
            for group in geometry.groups
            for layer in group.layers
            if (self.group is not None or self.layer)
            and self.group in (None, group.index)
            and self.layer in ("", layer.name)
        )


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load one request's KV from a remote prefiller.

    ``groups`` gives the local blocks to fill by group index. ``seconds`` from now the load must be complete, or it is a
    miss. ``refused`` is the cause where the load must be reported as failed without being tried (policy ``fail``).
    ``claimed`` is time.monotonic() of the scheduler's claim. With a ``transfer_id`` the KV is pushed: ``prefill`` then
    names the engine and its generation and no blocks. The first ``computed`` of the ``tokens`` are here already.
    ``digest`` is of the prompt, under the prefiller's key. With a ``fault`` it is to miss. ``again`` counts the claims
    of this request before. ``unanswered``: its claim is under way still, so nothing of it is reported before the
    `ClaimAnswer`, or kvd's word for its ``reader``; it was sent ``asked_before`` seconds ago. ``checked``: it is read
    from a prefix cache, whose holder is asked afterwards what became of that ``reader``'s blocks. ``traceparent`` is of
    its request (`kvd.wire.limits.TraceParent`). Of the steps under way none ``after`` that number (`StepOrders.number`)
    touches its blocks; None: any may. ``in_step``: its request computes in the very step that orders it, which runs
    behind it on the device (`kvd.worker.in_step`).
    """

    request_id: str
    prefill: RemotePrefill
    groups: dict[int, Blocks]
    tokens: int
    seconds: float
    claimed: float
    handshake_seconds: float = 0.0
    refused: Cause | None = None
    transfer_id: str = ""
    digest: str = ""
    computed: int = 0
    fault: Fault | None = None
    again: int = 0
    unanswered: bool = False
    reader: str = ""
    asked_before: float = 0.0
    checked: bool = False
    traceparent: str = ""
    after: int | None = None
    in_step: bool = False

    @property
    def block_ids(self) -> set[int]:
        """All local blocks of the load."""
        return {block for _, ids in self.groups.values() for block in ids}


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """How the claim of an ``unanswered`` load was answered.

    Confirmed: what came within ``seconds`` of the load's order may be used. ``refused``: nothing of it may. The answer
    came so many seconds ``ago``.
    """

    request_id: str
    seconds: float
    refused: Cause | None = None
    ago: float = 0.0


@dataclass(frozen=True, slots=True)
class PushStep:
    """A request that is pushed to a decoder, as it will be when this step has run.

    ``groups`` are its blocks by group index, from the block table: what a pulled prefill would offer; none where it is
    not scheduled. ``reached`` of its ``total`` tokens hold KV after the step, ``held`` before it. ``again``: it was
    preempted, so what is under way reads blocks that are no longer its own. ``sums``: its KV is added up. ``digest`` is
    of those ``total`` tokens, ``traceparent`` of the request (`kvd.wire.limits.TraceParent`).
    """

    transfer_id: str
    request_id: str
    groups: dict[int, Blocks]
    reached: int
    total: int
    again: bool = False
    held: int = 0
    sums: bool = False
    digest: str = ""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class PushEnd:
    """A pushed request has ended on the prefiller.

    Without a ``cause`` it is complete and its blocks are kept, for at most ``seconds``, until every decoding worker has
    its part; the worker then reports the request as sent. With one it was aborted: its blocks are gone, and so is what
    was to be sent.
    """

    transfer_id: str
    request_id: str
    seconds: float
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class StageOrder:
    """When the step has run, copy these blocks, by group index, to where peers read them: a prompt of ``tokens``."""

    request_id: str
    groups: dict[int, Blocks]
    tokens: int


@dataclass(frozen=True, slots=True)
class SumOrder:
    """When the step has run, add up these blocks, by group index, of which the prompt's ``tokens`` count.

    ``name`` is what the decoder asks by: the request's id, or that of its transfer where it is pushed.
    """

    name: str
    request_id: str
    groups: dict[int, Blocks]
    tokens: int


@dataclass(slots=True)
class SumOrders:
    """Prompts to be added up when the step has run, and by name those of which nobody will ask for the sums."""

    due: list[SumOrder] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


@dataclass(slots=True)
class StepOrders:
    """Everything for one step.

    It has loads to start, the answers on claims of earlier ones, and requests whose load nobody waits for any more. It
    has loads under way that must miss, by request. It names transfers (id and prefiller) of which nothing is wanted,
    because the prompt is cached here or the request has ended. It names requests whose blocks the prefiller may free
    now, what the prefiller computes for pushes, and pushes that ended. It says what peers may read of a staged engine
    after the step, and what to add up when the step has run. ``idle``: the step computes nothing. Steps have a
    ``number``, from 1 on, where it is known which blocks each may touch (`LoadOrder.after`). What was queued before a
    ``marked`` one is kept in mind: loads of later steps may wait for that.
    """

    loads: list[LoadOrder] = field(default_factory=list)
    answered: list[ClaimAnswer] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    faults: list[tuple[str, Fault]] = field(default_factory=list)
    declined: list[tuple[str, RemotePrefill]] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)
    pushes: list[PushStep] = field(default_factory=list)
    push_ends: list[PushEnd] = field(default_factory=list)
    stage: list[StageOrder] = field(default_factory=list)
    sums: SumOrders = field(default_factory=SumOrders)
    idle: bool = False
    number: int = 0
    marked: bool = False

    @property
    def may_wait(self) -> bool:
        """Whether all of it can be done with the next step (`take_over`).

        None of it is of what this step computes, or of what becomes of loads meanwhile.
        """
        loads = self.loads or self.answered or self.dropped or self.faults
        sums = self.sums.due or self.sums.dropped
        return not (loads or sums or self.pushes or self.push_ends or self.stage)

    def take_over(self, earlier: StepOrders) -> None:
        """Do what an earlier step was to do, whose orders `may_wait`."""
        self.declined = earlier.declined + self.declined
        self.freed = earlier.freed + self.freed


@dataclass(slots=True)
class StepOutcomes:
    """What happened to loads since the last step, by request, and what reads by peers cost.

    ``loads``: None for done, else the cause of the miss. ``quiesced``: the time.monotonic() at which
    nothing of it could land any more. ``prefixes``: after a miss, the tokens that may be claimed again.
    ``read_cost``: seconds that peers' reads cost this worker (`kvd.worker.host.read_cost`), where prefixes are shared.
    """

    loads: dict[str, Cause | None] = field(default_factory=dict)
    quiesced: dict[str, float] = field(default_factory=dict)
    prefixes: dict[str, int] = field(default_factory=dict)
    read_cost: float = 0.0

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.loads or self.read_cost)

    def merge(self, other: StepOutcomes) -> StepOutcomes:
        """Both workers' outcomes; a miss on any worker is a miss."""
        merged, quiesced, prefixes = dict(self.loads), dict(self.quiesced), dict(self.prefixes)
        for request_id, cause in other.loads.items():
            merged[request_id] = merged.get(request_id) or cause
        for request_id, ended in other.quiesced.items():
            quiesced[request_id] = max(ended, quiesced.get(request_id, ended))
        for request_id, tokens in other.prefixes.items():
            prefixes[request_id] = min(tokens, prefixes.get(request_id, tokens))
        # A step waits for the worker that is last. Workers that look in different steps count together.
        return StepOutcomes(merged, quiesced, prefixes, max(self.read_cost, other.read_cost))
