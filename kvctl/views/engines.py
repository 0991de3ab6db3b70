"""The Engines document: what `kvctl engines` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kvctl.cli.numbers import age
from kvctl.cli.units import Count, Scalar, Time, filled
from kvctl.views.folded.rows import listing
from kvctl.views.registry import View, moment, named
from kvctl.views.screen import Column, ScreenPart, measure, names, number, sizes, state
from kvd.addresses import join_address
from kvd.geometry.rank import RankName
from kvd.wire.identity import Endpoint, Role
from kvd.wire.outcomes import OutcomeCount
from kvd.wire.query import EngineRow

EngineNearness = Literal["local", "peer"]


class EngineDocument(Struct, frozen=True, kw_only=True):
    """One engine as the asked kvd sees it."""

    engine_id: str
    generation: Annotated[str, Meta(description="new at each start; empty while workers are missing")]
    model: str
    role: Role
    tp: Count
    pp: Count
    dcp: Count
    groups: Annotated[int, Meta(ge=0, description="KV cache groups")]
    place: EngineNearness
    state: Annotated[str, Meta(description="ready, partial, gone or unreachable")]
    since: Annotated[Time, Meta(description="last change of state")]
    world_size: Annotated[int, Meta(ge=0, description="workers that make the engine complete")]
    ranks: Annotated[tuple[RankName, ...], Meta(description="workers present")]
    scheduler: bool
    policy: Annotated[str, Meta(description="on a miss: recompute or fail; empty when unknown")]
    leases: Annotated[int, Meta(ge=0, description="leases open")]
    endpoint: Annotated[str | None, Meta(description="host:port of its kvd; null for a local engine")]
    served: Annotated[
        dict[str, Count],
        Meta(description="requests of the last minute by what became of their prompt; of local engines"),
    ]
    peers: Annotated[
        tuple[str, ...],
        Meta(
            description="engines whose handshake with this one is done, and kvds of other hosts that use it"
        ),
    ]
    compatibility_class: Annotated[
        str,
        Meta(description="engines of one class fit, others may; empty while it is not complete"),
    ]
    draining: Annotated[bool, Meta(description="it is to be given nothing new: kvctl drain")]
    reason: Annotated[str, Meta(description="why it is not ready")]
    facts: Annotated[dict[str, Scalar], Meta(description="what compatibility is decided on")]


class Engines(Struct, frozen=True, kw_only=True):
    """All engines that a kvd knows, local ones first."""

    engines: tuple[EngineDocument, ...]


def endpoint_name(endpoint: Endpoint) -> str | None:
    """``host:port``, brackets around IPv6; ``None`` for "the kvd you are talking to"."""
    return join_address(endpoint.host, endpoint.port) if endpoint.host else None


def engine_document(row: EngineRow, lately: tuple[OutcomeCount, ...] = ()) -> EngineDocument:
    """The document of one row of kvd's answer, and how that engine's requests were served ``lately``."""
    served: Counter[str] = Counter()
    for count in lately:
        served[count.outcome] += count.requests
    return filled(
        EngineDocument,
        row,
        row.engine,
        place="local" if row.local else "peer",
        since=moment(row.since),
        ranks=tuple(str(rank) for rank in row.ranks),
        endpoint=endpoint_name(row.endpoint),
        served=dict(served),
    )


def engines_screen(body: Engines, wide: bool) -> ScreenPart:
    """One engine a line."""
    return listing(body.engines, *engine_columns(body.engines, wide))


def engine_columns(engines: Sequence[EngineDocument], wide: bool) -> list[Column[Any]]:
    """The columns of engines, the name first; the reason is one as soon as one engine has one."""
    reasons = wide or any(engine.reason for engine in engines)
    return [
        names("ENGINE", lambda e: e.engine_id),
        Column("MODEL", lambda e: e.model),
        Column("ROLE", lambda e: e.role),
        Column("STATE", lambda e: state("draining" if e.draining and e.state == "ready" else e.state)),
        number("RANKS", lambda e: f"{len(e.ranks)}/{e.world_size}"),
        Column("SHAPE", lambda e: sizes(tp=e.tp, pp=e.pp, dcp=e.dcp)),
        measure("SINCE", lambda e: age(e.since), lambda e: -e.since.timestamp()),
        names("GENERATION", lambda e: e.generation or "-", wide),
        names("PLACE", lambda e: e.endpoint or e.place, wide),
        number("GROUPS", lambda e: e.groups, wide),
        Column("SCHEDULER", lambda e: "yes" if e.scheduler else "no", wide),
        Column("POLICY", lambda e: e.policy or "-", wide),
        number("LEASES", lambda e: e.leases, wide),
        Column(
            "SERVED", lambda e: ", ".join(f"{n} {outcome}" for outcome, n in e.served.items()) or "-", wide
        ),
        Column(
            "WEIGHTS", lambda e: str(e.facts.get("weights") or e.facts.get("weights_source") or "-"), wide
        ),
        Column("CLASS", lambda e: e.compatibility_class or "-", wide),
        Column("PEERS", lambda e: ",".join(e.peers) or "-", wide),
        Column("REASON", lambda e: e.reason or "-", reasons),
    ]


VIEWS = (
    View(Engines, engines_screen, "engines", EngineDocument, named("engines", lambda one: one.engine_id)),
)
