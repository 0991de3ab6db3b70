"""One description of a pair of engines for every kind of model: who reads what from whom, and what to know about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from kvd.geometry.model import EngineGeometry, GroupKind
from kvd.geometry.rank import RankName
from kvd.topology.compat import Factor, block_tokens, compare, compatible, groups_of
from kvd.topology.cost import RequestCost, request_cost
from kvd.topology.errors import TopologyError
from kvd.topology.findings import Finding, by_severity, find
from kvd.topology.plan import Cuts, Plan, plan_worker
from kvd.topology.reads import ReadShape
from kvd.topology.stock.findings import stock_findings
from kvd.topology.stock.rules import with_stock_rules

Count = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class EngineSummary:
    """One engine of a pair."""

    engine_id: str
    generation: str
    model: Annotated[str, Meta(description="empty where nobody told")]
    tp: Annotated[int, Meta(ge=0, description="0 where nobody told, as of pp and dcp")]
    pp: Count
    dcp: Count
    block_sizes: Annotated[
        tuple[Count, ...], Meta(description="tokens that one block covers, by group; 0 of a state")
    ]


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One KV cache group of the local engine."""

    index: Count
    kind: GroupKind
    layers: Annotated[tuple[str, ...], Meta(description="names, over all pipeline stages")]
    block_size: Annotated[int, Meta(ge=0, description="tokens; 0 where a block is a state")]
    bytes_per_block: Annotated[
        int,
        Meta(ge=0, description="content of one page of one layer on one worker, in bytes, without padding"),
    ]


# A struct, since large engines have tens of thousands of them.
class ReadSummary(Struct, frozen=True, gc=False):
    """What one local rank takes from one remote rank out of one block of one layer of one group.

    Where block sizes differ the figures are those of one *local* block, the largest if they are not alike.
    """

    local_rank: RankName
    remote_rank: RankName
    group: Count
    heads: Annotated[
        tuple[int, int] | None,
        Meta(
            description="first and one past the last of the model's heads; null without heads, or for a state"
        ),
    ]
    bytes_per_block: Annotated[int, Meta(ge=0, description="bytes")]
    segments_per_block: Annotated[int, Meta(ge=0, description="separate copies")]
    layers: Annotated[int, Meta(ge=0, description="layers read so; replicas take turns")]


@dataclass(frozen=True, slots=True)
class PairDescription:
    """Everything to know about ``local`` reading from ``remote``.

    ``reads`` are empty where no plan can be made. ``request`` is what one request costs, None where it was not asked
    for or there is no plan.
    """

    local: EngineSummary
    remote: EngineSummary
    compatible: bool
    factors: tuple[Factor, ...]
    groups: tuple[GroupSummary, ...]
    reads: tuple[ReadSummary, ...]
    findings: tuple[Finding, ...]
    request: RequestCost | None = None


def describe(local: EngineGeometry, remote: EngineGeometry, *, tokens: int | None = None) -> PairDescription:
    """Describe the pair, with the cost of a request of ``tokens`` tokens if given.

    Never raises `TopologyError`: what cannot be planned is a factor and a finding.
    """
    plans = plan_engine(local, remote)
    factors = with_stock_rules(compare(local, remote, plans), local, remote)
    request = request_cost(local, remote, plans, tokens=tokens) if plans and tokens else None
    return PairDescription(
        local=summarize_engine(local),
        remote=summarize_engine(remote),
        compatible=compatible(factors),
        factors=factors,
        groups=summarize_groups(local),
        reads=summarize_reads(plans),
        findings=by_severity((*find(local, remote, factors, plans, request), *stock_findings(local, remote))),
        request=request,
    )


def plan_engine(local: EngineGeometry, remote: EngineGeometry) -> tuple[Plan, ...]:
    """The plan of every local worker, in order of rank; empty where one of them has none."""
    if not remote.workers:
        return ()
    workers = sorted(local.workers, key=lambda w: w.rank)
    cuts = Cuts()
    try:
        return tuple(plan_worker(worker, local.workers, remote.workers, cuts) for worker in workers)
    except TopologyError:
        return ()


def summarize_engine(engine: EngineGeometry) -> EngineSummary:
    """What an engine is called and how it is split."""
    return EngineSummary(
        engine_id=engine.engine_id,
        generation=engine.generation,
        model=engine.model,
        tp=engine.tp,
        pp=engine.pp,
        dcp=engine.dcp,
        block_sizes=tuple(block_tokens(g) for g in groups_of(engine).values()),
    )


def summarize_groups(engine: EngineGeometry) -> tuple[GroupSummary, ...]:
    """Each group of the engine, its layers over all pipeline stages."""
    return tuple(
        GroupSummary(
            index=index,
            kind=group.kind,
            layers=tuple(
                dict.fromkeys(
                    name
                    for w in engine.workers
                    for g in w.groups
                    if g.index == index
                    for name in g.layer_names
                )
            ),
            block_size=block_tokens(group),
            bytes_per_block=group.layers[0].page.content if group.layers else 0,
        )
        for index, group in groups_of(engine).items()
    )


def summarize_reads(plans: Sequence[Plan]) -> tuple[ReadSummary, ...]:
    """The reads of all workers, one line for each local rank, remote rank, group and range of heads.

    What plans of one pattern, and reads of the same shapes, have in common is worked out once.
    """
    known: dict[tuple[int, ...], tuple[int, int, int]] = {}
    names: dict[int, tuple[str, ...]] = {}
    by_pattern: dict[int, list[_ReadParts]] = {}
    found: list[ReadSummary] = []
    for plan in plans:
        if id(plan.pattern) not in by_pattern:
            if id(plan.remote_ranks) not in names:
                names[id(plan.remote_ranks)] = tuple(map(str, plan.remote_ranks))
            by_pattern[id(plan.pattern)] = _read_parts(plan, names[id(plan.remote_ranks)], known)
        local = str(plan.local_rank)
        found += [ReadSummary(local, *parts) for parts in by_pattern[id(plan.pattern)]]
    return tuple(found)


_ReadParts = tuple[str, int, tuple[int, int] | None, int, int, int]
"""A `ReadSummary` but for its local rank."""


def _read_parts(
    plan: Plan, remotes: Sequence[str], known: dict[tuple[int, ...], tuple[int, int, int]]
) -> list[_ReadParts]:
    alike: dict[tuple[int, int, int, tuple[int, int] | None], list[ReadShape]] = {}
    for read in plan.reads:
        shape = read.shape
        key = (shape.group, read.remote, shape.remote_group, shape.heads)
        alike.setdefault(key, []).append(shape)
    found = []
    for (group, remote, _, heads), shapes in sorted(alike.items(), key=lambda item: item[0][:3]):
        same = tuple([id(shape) for shape in shapes])
        if same not in known:
            known[same] = _amounts(shapes)
        found.append((remotes[remote], group, heads, *known[same]))
    return found


def _amounts(shapes: Sequence[ReadShape]) -> tuple[int, int, int]:
    """Of reads between two ranks: bytes and separate copies of the largest block, and number of layers."""
    return (
        largest_block((s.phase.local, s.layers, s.layer_bytes) for s in shapes),
        largest_block((s.phase.local, s.layers, s.layer_segments) for s in shapes),
        len({name for s in shapes for name in s.layers}),
    )


def largest_block(parts: Iterable[tuple[int, tuple[str, ...], int]]) -> int:
    """The most that any one local block of any one layer takes, from (local phase, layers, amount) of each read."""
    total: dict[tuple[int, str], int] = {}
    for phase, layers, amount in parts:
        for layer in layers:
            total[phase, layer] = total.get((phase, layer), 0) + amount
    return max(total.values(), default=0)
