"""The Topology document: what `kvctl describe-topology` prints."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvctl.cli.units import Bytes, BytesPerSecond, Seconds, filled
from kvctl.views.topology.localities import WorkerLocality
from kvd.geometry.rank import RankName
from kvd.topology.cost import RequestCost
from kvd.topology.describe import EngineSummary, GroupSummary, PairDescription, ReadSummary
from kvd.topology.findings import Finding


class PairFactor(Struct, frozen=True, kw_only=True):
    """One thing that both engines were compared by."""

    name: str
    local: str
    remote: str
    ok: bool
    note: str


class RankLink(Struct, frozen=True, kw_only=True, gc=False):
    """What one remote rank sends to one local rank for one request."""

    local_rank: RankName
    remote_rank: RankName
    bytes: Bytes


class RequestDocument(Struct, frozen=True, kw_only=True):
    """What one request costs of which the local engine knows nothing yet; whole blocks are moved."""

    tokens: Annotated[int, Meta(ge=1, description="length of the request")]
    bytes: Bytes
    descriptors: Annotated[int, Meta(ge=0, description="copies, page by page of each layer")]
    coalesced_descriptors: Annotated[
        int, Meta(ge=0, description="copies where the request's blocks stand in a row on both sides")
    ]
    bytes_by_rank: Annotated[dict[str, Bytes], Meta(description="what each remote rank sends, in bytes")]
    bytes_by_local_rank: Annotated[dict[str, Bytes], Meta(description="what each local rank takes, in bytes")]
    links: tuple[RankLink, ...]
    bandwidth: Annotated[
        BytesPerSecond | None, Meta(description="of each rank's link, in bytes per second, as it was given")
    ]
    seconds: Annotated[
        Seconds | None, Meta(description="least time at that bandwidth: that of the busiest rank, in seconds")
    ]


class PairDocument(Struct, frozen=True, kw_only=True):
    """One engine (local) that reads from another (remote)."""

    local: EngineSummary
    remote: EngineSummary
    compatible: bool
    factors: tuple[PairFactor, ...]
    groups: tuple[GroupSummary, ...]
    reads: tuple[ReadSummary, ...]
    findings: tuple[Finding, ...]
    request: Annotated[
        RequestDocument | None,
        Meta(description="null where the engines cannot be mapped, or it was not asked for"),
    ] = None


class Topology(Struct, frozen=True, kw_only=True):
    """Who reads which bytes from whom, pair by pair."""

    pairs: tuple[PairDocument, ...]
    workers: Annotated[
        tuple[WorkerLocality, ...],
        Meta(description="where workers of the pairs stand in this kvd's host, of those that told it"),
    ] = ()


def pair_document(pair: PairDescription, bandwidth: float | None = None) -> PairDocument:
    """The document of one described pair; ``bandwidth`` of each rank's link is in bytes per second."""
    return filled(
        PairDocument,
        pair,
        factors=tuple(filled(PairFactor, factor) for factor in pair.factors),
        request=None if pair.request is None else _request(pair.request, bandwidth),
    )


def _request(cost: RequestCost, bandwidth: float | None) -> RequestDocument:
    return filled(
        RequestDocument,
        cost,
        bytes_by_rank=dict(cost.bytes_by_rank),
        bytes_by_local_rank=dict(cost.bytes_by_local_rank),
        links=tuple(
            RankLink(local_rank=here, remote_rank=there, bytes=count)
            for (here, there), count in cost.bytes_by_link.items()
        ),
        bandwidth=bandwidth,
        seconds=None if bandwidth is None else cost.seconds(bandwidth),
    )
