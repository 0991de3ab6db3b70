"""The Replay document: what `kvctl replay` prints."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvctl.views.benchmark import Quantiles
from kvctl.views.fields import Bytes, BytesPerSecond, Count, Seconds, Time

Stages = Annotated[dict[str, Quantiles], Meta(description="seconds in each stage, in order")]


class RecordedFigures(Struct, frozen=True, kw_only=True):
    """What the trace says of the transfers that were replayed."""

    transfers: Count
    bytes: Bytes
    descriptors: Count
    backends: tuple[str, ...]
    seconds: Annotated[Quantiles, Meta(description="all stages of a transfer together")]
    stages: Stages
    bytes_per_second: Annotated[
        float, Meta(ge=0, description="bytes over the stages post and wire, added up")
    ]


class Variant(Struct, frozen=True, kw_only=True):
    """The same transfers replayed in one way."""

    name: str
    backend: str
    coalesced: bool
    environment: dict[str, str]
    transport: Annotated[str, Meta(description="what moved the bytes; empty where the backend does not tell")]
    transfers: Count
    bytes: Bytes
    descriptors: Count
    verified: Annotated[bool, Meta(description="every byte that landed was compared")]
    late: Annotated[Quantiles, Meta(description="how much later than recorded transfers began")]
    seconds: Annotated[Quantiles, Meta(description="of a transfer, from planning to its last byte")]
    stages: Stages
    bytes_per_second: BytesPerSecond
    dominant: Annotated[str, Meta(description="the stage that took most of the time")]
    dominant_share: Annotated[float, Meta(ge=0, le=1)]


class LeftOut(Struct, frozen=True, kw_only=True):
    """Transfers that were not replayed."""

    transfers: Count
    reason: str


class Replay(Struct, frozen=True, kw_only=True):
    """A trace replayed between two processes, beside its record."""

    trace: str
    models: tuple[str, ...]
    pace: Annotated[str, Meta(description="original times, so many times as fast, or so many at a time")]
    scale: Annotated[float, Meta(gt=0, le=1, description="share of each prompt's tokens that was moved")]
    to: Annotated[str, Meta(description="where the sources ran, as host:port; empty on this host")]
    memory: Annotated[int, Meta(ge=0, description="bytes of KV memory of the largest pair of processes")]
    cores: Count
    load: Annotated[float, Meta(ge=0, description="the host's load at the beginning")]
    started: Time
    took: Seconds
    recorded: RecordedFigures
    variants: tuple[Variant, ...]
    winner: Annotated[str, Meta(description="the variant with the highest rate")]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]
