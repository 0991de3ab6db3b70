"""The Benchmark document: what `kvctl benchmark` prints."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvctl.views.fields import BytesPerSecond, Count, RankName, Seconds, Time

Ratio = Annotated[float, Meta(ge=0, description="of the rate to that ceiling, the median over the rounds")]


class Quantiles(Struct, frozen=True, kw_only=True):
    """Of one stage over all requests of all rounds; seconds."""

    p50: Seconds
    p90: Seconds
    p99: Seconds


class Ceiling(Struct, frozen=True, kw_only=True):
    """What the machine did at best beside a measurement, in the same rounds."""

    name: Annotated[
        Literal["memcpy", "large", "tcp"],
        Meta(description="a copy in one process, one large transfer with the same backend, a TCP stream"),
    ]
    bytes_per_second: BytesPerSecond
    ratio: Ratio


class Measurement(Struct, frozen=True, kw_only=True):
    """One way to move requests of one size."""

    backend: str
    operation: Literal["read", "write"]
    transport: Annotated[str, Meta(description="what moved the bytes; empty where the backend does not tell")]
    tokens: Annotated[int, Meta(ge=1, description="of each request")]
    concurrency: Annotated[int, Meta(ge=1, description="requests under way at a time")]
    fragmentation: Annotated[str, Meta(description="how blocks lie on both sides")]
    rounds: Count
    bytes: Annotated[int, Meta(ge=0, description="bytes of one request")]
    descriptors: Annotated[int, Meta(ge=0, description="of one request, coalesced")]
    verified: Annotated[bool, Meta(description="every byte that landed was compared")]
    bytes_per_second: Annotated[
        float, Meta(ge=0, description="of all requests together, from planning the first to the last byte")
    ]
    stages: Annotated[
        dict[str, Quantiles],
        Meta(
            description="plan, prepare, post, wire, complete; a backend that copies in the post has no wire"
        ),
    ]
    ceilings: tuple[Ceiling, ...]


class Warned(Struct, frozen=True, kw_only=True):
    """Something to look at."""

    code: str
    message: str


class Benchmark(Struct, frozen=True, kw_only=True):
    """What two processes can move of a model's KV, beside what the machine can do at best."""

    model: str
    local: Annotated[str, Meta(description="the reading engine")]
    remote: Annotated[str, Meta(description="the engine that is read from")]
    local_rank: RankName
    remote_ranks: tuple[RankName, ...]
    memory: Annotated[int, Meta(ge=0, description="bytes of KV memory of both processes")]
    blocks: Annotated[tuple[int, int], Meta(description="blocks of a worker of either side")]
    devices: Annotated[tuple[str, ...], Meta(description="where the memory of the reader and the source is")]
    to: Annotated[str, Meta(description="where the source runs, as host:port; empty on this host")]
    cores: Count
    load: Annotated[float, Meta(ge=0, description="the host's load at the beginning")]
    started: Time
    seconds: Seconds
    measurements: tuple[Measurement, ...]
    warnings: tuple[Warned, ...]
    notes: Annotated[tuple[str, ...], Meta(description="what was left out, and why")]
