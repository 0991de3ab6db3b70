"""The Leases document, what `kvctl leases` prints, and that of a release."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kvctl.cli.numbers import span
from kvctl.cli.units import Count, Seconds, Time
from kvctl.views.engines import endpoint_name
from kvctl.views.folded.rows import listing
from kvctl.views.registry import View, moment
from kvctl.views.screen import Column, ScreenPart, measure, names, number, state, table
from kvd.wire.order import ForcePlan, LeaseEnding
from kvd.wire.query import LeaseRow

LeaseSide = Literal["gives", "claims"]
NAMED = 3
"""Readers of a lease that stand in its row."""


class LeaseClaimant(Struct, frozen=True, kw_only=True):
    """Who claimed a lease."""

    name: Annotated[str, Meta(description="an engine of this host; else the place or the key of its host")]
    left: Annotated[Seconds, Meta(description="seconds for which it was promised that the blocks are kept")]


class LeaseDocument(Struct, frozen=True, kw_only=True):
    """A lease as one of its two sides has it; one between two engines of a host is there from both."""

    engine_id: Annotated[str, Meta(description="the prefiller whose blocks are kept")]
    request_id: Annotated[str, Meta(description="the prefill's request")]
    side: Annotated[
        LeaseSide,
        Meta(description="gives: the prefiller is of this host; claims: an engine here reads under it"),
    ]
    state: Annotated[
        Literal["open", "claimed", "ending"],
        Meta(description="open: nobody has claimed it; ending: nobody else is let in"),
    ]
    blocks: Annotated[Count | None, Meta(description="blocks that are kept; null where an engine here reads")]
    readers: Annotated[Count, Meta(description="claims on it that were not released")]
    held_by: Annotated[
        tuple[LeaseClaimant, ...], Meta(description="who claimed it, at most 16: those promised most first")
    ]
    since: Annotated[Time, Meta(description="when it was opened, or claimed")]
    age: Annotated[Seconds, Meta(description="seconds since then")]
    ends: Annotated[Time, Meta(description="when it ends unless it is kept longer or released")]
    left: Annotated[Seconds, Meta(description="seconds until then")]
    endpoint: Annotated[str | None, Meta(description="host:port of the prefiller's kvd; null for this one")]


class LeasesDocument(Struct, frozen=True, kw_only=True):
    """Blocks that prefillers keep for decoders, and what engines here claimed, the oldest first."""

    leases: tuple[LeaseDocument, ...]


class ReleasedLease(Struct, frozen=True, kw_only=True):
    """What follows for one side of a lease that is released."""

    engine_id: str
    request_id: str
    side: LeaseSide
    effect: Annotated[
        Literal["ends", "misses"],
        Meta(description="ends: the prefiller frees its blocks; misses: a load of an engine here misses"),
    ]
    reader: Annotated[str, Meta(description="the engine whose load misses; else empty")]
    request: Annotated[str, Meta(description="that engine's request, which is computed again; else empty")]
    blocks: Count | None
    readers: Annotated[
        Count | None, Meta(description="claims that keep what they were promised; null of a miss")
    ]
    seconds: Annotated[
        Seconds, Meta(description="until the blocks are free at the latest; 0: at once, or as soon as can be")
    ]
    recomputes: Annotated[
        Count | None, Meta(description="tokens that are computed again; null where none is")
    ]
    carried_out: bool


class ReleasedLeases(Struct, frozen=True, kw_only=True):
    """A release, planned or carried out: what follows on each side that this kvd knows."""

    released: tuple[ReleasedLease, ...]


def lease_document(row: LeaseRow, now: datetime) -> LeaseDocument:
    """The document of one row of kvd's answer."""
    claimed = bool(row.reader)
    mine = (LeaseClaimant(name=row.reader, left=max(0.0, row.left)),) if claimed else ()
    others = tuple(LeaseClaimant(name=one.who, left=max(0.0, one.left)) for one in row.claims)
    return LeaseDocument(
        engine_id=row.engine_id,
        request_id=row.request_id,
        side="claims" if claimed else "gives",
        state="ending" if row.ending else "claimed" if claimed or row.readers else "open",
        blocks=None if claimed else row.blocks,
        readers=row.readers,
        held_by=mine or others,
        since=moment(now.timestamp() - max(0.0, row.age)),
        age=max(0.0, row.age),
        ends=moment(now.timestamp() + max(0.0, row.left)),
        left=max(0.0, row.left),
        endpoint=endpoint_name(row.endpoint),
    )


def ended_document(ending: LeaseEnding) -> ReleasedLease:
    """What follows for the prefiller."""
    return ReleasedLease(
        engine_id=ending.engine_id,
        request_id=ending.request_id,
        side="gives",
        effect="ends",
        reader="",
        request="",
        blocks=ending.blocks,
        readers=ending.readers,
        seconds=max(0.0, ending.seconds),
        recomputes=None,
        carried_out=ending.carried_out,
    )


def missed_documents(row: LeaseRow, plan: ForcePlan) -> tuple[ReleasedLease, ...]:
    """What follows for the engine that claimed it: one for each of its requests that reads under the lease."""
    return tuple(
        ReleasedLease(
            engine_id=row.engine_id,
            request_id=row.request_id,
            side="claims",
            effect="misses",
            reader=plan.engine_id,
            request=request.request_id,
            blocks=None,
            readers=None,
            seconds=0.0,
            recomputes=request.recomputes,
            carried_out=plan.carried_out,
        )
        for request in plan.requests
    )


def leases_screen(body: LeasesDocument, wide: bool) -> ScreenPart:
    """One side of a lease a line."""
    return listing(body.leases, *lease_columns(wide))


def lease_columns(wide: bool) -> list[Column[Any]]:
    """The columns of leases, whose they are first."""
    return [
        names("ENGINE", lambda x: x.engine_id),
        names("REQUEST", lambda x: x.request_id),
        Column("SIDE", lambda x: x.side),
        Column("STATE", lambda x: state(x.state)),
        measure("BLOCKS", lambda x: x.blocks, lambda x: x.blocks),
        names("HELD BY", _held_by),
        measure("AGE", lambda x: span(x.age), lambda x: x.age),
        measure("LEFT", lambda x: span(x.left), lambda x: x.left),
        number("READERS", lambda x: x.readers, wide),
        names("ENDS", lambda x: x.ends.isoformat(timespec="seconds"), wide),
        names("PLACE", lambda x: x.endpoint or "local", wide),
    ]


def released_screen(body: ReleasedLeases, wide: bool) -> ScreenPart:
    """What follows, one side a line."""
    return table(
        body.released,
        Column("ENGINE", lambda x: x.engine_id),
        Column("REQUEST", lambda x: x.request_id),
        Column("SIDE", lambda x: x.side),
        Column("WHAT", _what),
        number("BLOCKS", lambda x: x.blocks, wide),
        Column("DONE", lambda x: "yes" if x.carried_out else "no"),
    )


def _held_by(lease: LeaseDocument) -> str:
    names = [claimant.name for claimant in lease.held_by]
    shown = ", ".join(dict.fromkeys(names[:NAMED]))
    more = lease.readers - min(len(names), NAMED)
    return f"{shown} and {more} more" if shown and more > 0 else shown or "-"


def _what(one: ReleasedLease) -> str:
    if one.effect == "misses":
        return f"{one.request} of {one.reader} misses: {one.recomputes} tokens are computed again"
    if not one.readers and not one.seconds:
        return "its blocks are free at once; who comes for it computes"
    who = f"{one.readers} claims keep" if one.readers != 1 else "1 claim keeps"
    return f"nobody else is let in; {who} what was promised, {span(one.seconds)} at most"


def lease_names(leases: Sequence[LeaseDocument]) -> str:
    """ENGINE/REQUEST of each lease, one a line; one that is here from both sides is named once."""
    return "".join(f"{name}\n" for name in dict.fromkeys(f"{x.engine_id}/{x.request_id}" for x in leases))


VIEWS = (
    View(
        LeasesDocument,
        leases_screen,
        "leases",
        LeaseDocument,
        {"name": lambda body: lease_names(body.leases)},
    ),
    View(ReleasedLeases, released_screen, "released", ReleasedLease),
)
