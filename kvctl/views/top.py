"""The Top document: what `kvctl top` prints where it is no full screen."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvctl.cli.numbers import age, clock, rate, span
from kvctl.cli.units import Bytes, BytesPerSecond, Count, Seconds, Time
from kvctl.views.engines import EngineDocument
from kvctl.views.registry import View
from kvctl.views.screen import Column, ScreenPart, Styled, number, spaced, state, table
from kvctl.views.transfers.document import TransferDocument

SHOWN = 10
"""Transfers, and of those in flight, on the plain page; all with -o wide."""


class EngineLoad(Struct, frozen=True, kw_only=True):
    """One engine, and what it moved in the window."""

    engine: EngineDocument
    bytes_in: Annotated[Bytes, Meta(description="loaded from other engines, in the window")]
    bytes_out: Annotated[Bytes, Meta(description="loaded from it by engines that this kvd has records of")]
    bytes_in_per_second: Annotated[BytesPerSecond, Meta(description="bytes_in over the window")]
    bytes_out_per_second: Annotated[BytesPerSecond, Meta(description="bytes_out over the window")]
    misses: Annotated[Count, Meta(description="transfers to it that missed, in the window")]


class PairLoad(Struct, frozen=True, kw_only=True):
    """What one engine loaded from another one in the window."""

    remote_engine: str
    local_engine: str
    transfers: Count
    misses: Count
    bytes: Bytes
    bytes_per_second: Annotated[BytesPerSecond, Meta(description="bytes over the window")]
    seconds_p50: Seconds
    seconds_p99: Seconds


class InFlight(Struct, frozen=True, kw_only=True):
    """A lease that somebody reads under: a transfer on its way, as the asked kvd knows it."""

    remote_engine: Annotated[str, Meta(description="the prefiller")]
    local_engine: Annotated[
        str, Meta(description="who reads, where that is an engine of this kvd; else empty")
    ]
    request_id: Annotated[str, Meta(description="the prefiller's id")]
    seconds: Annotated[
        Seconds, Meta(description="since it was claimed, or opened where the prefiller is here")
    ]
    left: Annotated[Seconds, Meta(description="for which the blocks are still kept")]
    readers: Count


class MissLoad(Struct, frozen=True, kw_only=True):
    """Misses of one code."""

    code: str
    lately: Annotated[Count, Meta(description="in the window")]
    total: Annotated[Count, Meta(description="since this kvd was started")]
    cause: Annotated[str, Meta(description="of the newest one that was seen; may be empty")]
    request_id: Annotated[str, Meta(description="the same")]


class Top(Struct, frozen=True, kw_only=True):
    """What moves at one kvd just now."""

    time: Time
    kvd_id: str
    host: str
    version: str
    started: Time
    window: Annotated[
        Seconds,
        Meta(
            description="over which engines, pairs and misses are counted: 60, or fewer where there were many"
        ),
    ]
    bytes_per_second: Annotated[BytesPerSecond, Meta(description="loaded by engines here")]
    transfers_per_second: float
    misses: Annotated[Count, Meta(description="in the window")]
    leases_open: Annotated[Count, Meta(description="of engines here, read or not")]
    in_flight_total: Annotated[Count, Meta(description="of which in_flight has the oldest")]
    pushes: Annotated[Count, Meta(description="messages of pushes that this kvd carries just now")]
    engines: tuple[EngineLoad, ...]
    pairs: Annotated[tuple[PairLoad, ...], Meta(description="most bytes first")]
    in_flight: Annotated[tuple[InFlight, ...], Meta(description="oldest first")]
    transfers: Annotated[tuple[TransferDocument, ...], Meta(description="newest first")]
    miss_codes: Annotated[tuple[MissLoad, ...], Meta(description="most in the window first")]
    not_answered: Annotated[tuple[str, ...], Meta(description="what kvd did not say, and why")]


def heading(body: Top) -> ScreenPart:
    """Which kvd, and the figures of all of it, in two lines."""
    leases = f"{body.leases_open} open {'lease' if body.leases_open == 1 else 'leases'}"
    missed = f"{body.misses} {'miss' if body.misses == 1 else 'misses'}"
    return [
        (
            Styled(body.kvd_id, "bold"),
            f" on {body.host}, {body.version}, up {age(body.started)}",
            Styled(f"  {clock(body.time)}", "dim"),
        ),
        (
            Styled(rate(body.bytes_per_second), "bold"),
            f"  {body.transfers_per_second:.1f} transfers/s  {body.in_flight_total} in flight  ",
            f"{leases}  ",
            Styled(f"{missed} in {span(body.window)}", "red" if body.misses else ""),
        ),
    ]


def top_screen(body: Top, wide: bool) -> ScreenPart:
    """The heading, and a table each of engines, pairs, transfers in flight, misses and the newest transfers."""
    some = None if wide else SHOWN
    parts: list[ScreenPart] = [
        [heading(body), *(Styled(f"not answered: {text}", "yellow") for text in body.not_answered)]
    ]
    if body.engines:
        parts.append(_engines(body))
    if body.pairs:
        parts.append(_pairs(body))
    if body.in_flight:
        parts.append(_in_flight(body.in_flight[:some]))
    if body.miss_codes:
        parts.append(
            table(
                body.miss_codes,
                Column("MISS", lambda miss: Styled(miss.code, "red" if miss.lately else "")),
                number("LATELY", lambda miss: miss.lately),
                number("TOTAL", lambda miss: miss.total),
                Column("CAUSE", lambda miss: miss.cause or "-"),
            )
        )
    if body.transfers:
        parts.append(_transfers(body.transfers[:some]))
    return spaced(parts)


def _engines(body: Top) -> ScreenPart:
    return table(
        body.engines,
        Column("ENGINE", lambda one: one.engine.engine_id),
        Column("ROLE", lambda one: one.engine.role),
        Column("STATE", lambda one: state(one.engine.state)),
        number("RANKS", lambda one: f"{len(one.engine.ranks)}/{one.engine.world_size}"),
        number("LEASES", lambda one: one.engine.leases),
        number("IN", lambda one: rate(one.bytes_in_per_second)),
        number("OUT", lambda one: rate(one.bytes_out_per_second)),
        number("MISSES", lambda one: one.misses),
    )


def _pairs(body: Top) -> ScreenPart:
    return table(
        body.pairs,
        Column("FROM", lambda pair: pair.remote_engine),
        Column("TO", lambda pair: pair.local_engine),
        number("TRANSFERS", lambda pair: pair.transfers),
        number("MISSES", lambda pair: pair.misses),
        number("RATE", lambda pair: rate(pair.bytes_per_second)),
        number("P50", lambda pair: span(pair.seconds_p50)),
        number("P99", lambda pair: span(pair.seconds_p99)),
    )


def _in_flight(rows: tuple[InFlight, ...]) -> ScreenPart:
    return table(
        rows,
        number("SINCE", lambda one: span(one.seconds)),
        number("LEFT", lambda one: span(one.left)),
        Column("FROM", lambda one: one.remote_engine),
        Column("TO", lambda one: one.local_engine or f"{one.readers} elsewhere"),
        Column("REQUEST", lambda one: one.request_id),
    )


def _transfers(rows: tuple[TransferDocument, ...]) -> ScreenPart:
    return table(
        rows,
        Column("STARTED", lambda one: clock(one.started)),
        Column("FROM", lambda one: one.remote_engine),
        Column("TO", lambda one: f"{one.local_engine}/{one.local_rank}"),
        Column(
            "STATE", lambda one: state(one.code or one.state) if one.code == "" else Styled(one.code, "red")
        ),
        number("TIME", lambda one: span(one.seconds)),
        number("RATE", lambda one: rate(one.bytes_per_second)),
        Column("REQUEST", lambda one: one.request_id),
    )


VIEWS = (View(Top, top_screen),)
