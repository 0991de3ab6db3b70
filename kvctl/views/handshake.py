"""The HandshakeBenchmark document: what `kvctl benchmark --handshake` prints."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvctl.views.benchmark import Quantiles
from kvctl.views.fields import Count, Seconds, Time


class HandshakeMeasurement(Struct, frozen=True, kw_only=True):
    """One case of the handshake between engines of two sizes."""

    local_ranks: Annotated[int, Meta(ge=1, description="ranks that ask, all at once")]
    remote_ranks: Annotated[int, Meta(ge=1, description="ranks of the engine that they ask for")]
    case: Annotated[
        Literal["cold", "warm", "replica", "restart"],
        Meta(
            description="cold: both kvds have just started; warm: kvd knows the engine;"
            " replica: another engine of the same geometry; restart: the engine came back with new workers"
        ),
    ]
    rounds: Count
    each: Annotated[Quantiles, Meta(description="what a rank waited for its answer")]
    whole: Annotated[Quantiles, Meta(description="until all ranks had theirs")]
    processor_seconds: Annotated[
        float, Meta(ge=0, description="on processors, of both kvds and all workers; the middle of the rounds")
    ]
    handshakes_per_second: Annotated[float, Meta(ge=0, description="answers over the middle of whole")]
    bytes: Annotated[int, Meta(ge=0, description="of one rank's answer, which is about all remote ranks")]


class HandshakeBenchmark(Struct, frozen=True, kw_only=True):
    """What the handshake between two engines costs on this host: simulated workers, two real kvds."""

    model: str
    cores: Count
    load: Annotated[float, Meta(ge=0, description="the host's load at the beginning")]
    started: Time
    seconds: Seconds
    measurements: tuple[HandshakeMeasurement, ...]
