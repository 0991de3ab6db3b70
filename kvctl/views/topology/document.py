"""The Topology document: what `kvctl describe-topology` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct

from kvctl.views.fields import Bytes, BytesPerSecond, Count, RankName, Seconds

if TYPE_CHECKING:
    from kvd.topology.compat import Factor as FactorFound
    from kvd.topology.cost import RequestCost
    from kvd.topology.describe import EngineSummary, PairDescription

HeadRange = Annotated[
    tuple[int, int] | None,
    Meta(
        description="first head and one past the last, of the model's heads; null where there is no head axis"
    ),
]


Severity = Literal["error", "warning", "info"]


class EngineEnd(Struct, frozen=True, kw_only=True):
    """One engine of a pair."""

    engine_id: str
    generation: str
    model: str
    tp: Count
    pp: Count
    dcp: Count
    block_sizes: Annotated[
        tuple[Count, ...], Meta(description="tokens that one block covers, by group; 0 of a state")
    ]


class Factor(Struct, frozen=True, kw_only=True):
    """One thing that both engines were compared by."""

    name: str
    local: str
    remote: str
    ok: bool
    note: str


class Group(Struct, frozen=True, kw_only=True):
    """One KV cache group of the local engine."""

    index: Count
    kind: str
    layers: Annotated[tuple[str, ...], Meta(description="names, over all pipeline stages")]
    block_size: Annotated[int, Meta(ge=0, description="tokens; 0 where a block is a state")]
    bytes_per_block: Annotated[Bytes, Meta(description="content of one page of one layer, in bytes")]


class Read(Struct, frozen=True, kw_only=True):
    """What one local rank reads from one remote rank out of one local block of one layer of one group."""

    local_rank: RankName
    remote_rank: RankName
    group: Count
    heads: HeadRange
    bytes_per_block: Bytes
    segments_per_block: Annotated[int, Meta(ge=0, description="separate copies")]
    layers: Annotated[int, Meta(ge=0, description="layers read so")]


class Link(Struct, frozen=True, kw_only=True):
    """What one remote rank sends to one local rank for one request."""

    local_rank: RankName
    remote_rank: RankName
    bytes: Bytes


class Request(Struct, frozen=True, kw_only=True):
    """What one request costs of which the local engine knows nothing yet; whole blocks are moved."""

    tokens: Annotated[int, Meta(ge=1, description="length of the request")]
    bytes: Bytes
    descriptors: Annotated[int, Meta(ge=0, description="copies, page by page of each layer")]
    coalesced_descriptors: Annotated[
        int, Meta(ge=0, description="copies where the request's blocks stand in a row on both sides")
    ]
    bytes_by_rank: Annotated[dict[str, Bytes], Meta(description="what each remote rank sends, in bytes")]
    bytes_by_local_rank: Annotated[dict[str, Bytes], Meta(description="what each local rank takes, in bytes")]
    links: tuple[Link, ...]
    bandwidth: Annotated[
        BytesPerSecond | None, Meta(description="of each rank's link, in bytes per second, as it was given")
    ]
    seconds: Annotated[
        Seconds | None, Meta(description="least time at that bandwidth: that of the busiest rank, in seconds")
    ]


class Finding(Struct, frozen=True, kw_only=True):
    """Something that an operator should know of a pair."""

    code: Annotated[str, Meta(description="stable")]
    severity: Severity
    message: str
    hint: str


class Pair(Struct, frozen=True, kw_only=True):
    """One engine (local) that reads from another (remote)."""

    local: EngineEnd
    remote: EngineEnd
    compatible: bool
    factors: tuple[Factor, ...]
    groups: tuple[Group, ...]
    reads: tuple[Read, ...]
    findings: tuple[Finding, ...]
    request: Annotated[
        Request | None, Meta(description="null where the engines cannot be mapped, or it was not asked for")
    ] = None


class Topology(Struct, frozen=True, kw_only=True):
    """Who reads which bytes from whom, pair by pair."""

    pairs: tuple[Pair, ...]


def pair_document(pair: PairDescription, bandwidth: float | None = None) -> Pair:
    """The document of one described pair; ``bandwidth`` of each rank's link is in bytes per second."""
    return Pair(
        local=end_document(pair.local),
        remote=end_document(pair.remote),
        compatible=pair.compatible,
        factors=tuple(map(_factor, pair.factors)),
        groups=tuple(
            Group(
                index=g.index,
                kind=g.kind,
                layers=g.layers,
                block_size=g.block_size,
                bytes_per_block=g.bytes_per_block,
            )
            for g in pair.groups
        ),
        reads=tuple(
            Read(
                local_rank=r.local_rank,
                remote_rank=r.remote_rank,
                group=r.group,
                heads=r.heads,
                bytes_per_block=r.bytes_per_block,
                segments_per_block=r.segments_per_block,
                layers=r.layers,
            )
            for r in pair.reads
        ),
        findings=tuple(
            Finding(code=f.code, severity=f.severity, message=f.message, hint=f.hint) for f in pair.findings
        ),
        request=None if pair.request is None else _request(pair.request, bandwidth),
    )


def _factor(factor: FactorFound) -> Factor:
    return Factor(name=factor.name, local=factor.local, remote=factor.remote, ok=factor.ok, note=factor.note)


def _request(cost: RequestCost, bandwidth: float | None) -> Request:
    return Request(
        tokens=cost.tokens,
        bytes=cost.bytes,
        descriptors=cost.descriptors,
        coalesced_descriptors=cost.coalesced_descriptors,
        bytes_by_rank=dict(cost.bytes_by_rank),
        bytes_by_local_rank=dict(cost.bytes_by_local_rank),
        links=tuple(
            Link(local_rank=here, remote_rank=there, bytes=count)
            for (here, there), count in cost.bytes_by_link.items()
        ),
        bandwidth=bandwidth,
        seconds=None if bandwidth is None else cost.seconds(bandwidth),
    )


def end_document(engine: EngineSummary) -> EngineEnd:
    """The document of one engine of a pair."""
    return EngineEnd(
        engine_id=engine.engine_id,
        generation=engine.generation,
        model=engine.model,
        tp=engine.tp,
        pp=engine.pp,
        dcp=engine.dcp,
        block_sizes=engine.block_sizes,
    )
