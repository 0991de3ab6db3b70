"""The Replay document: what `kvctl replay` prints."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvctl.cli.numbers import rate, size, span
from kvctl.cli.units import Bytes, BytesPerSecond, Count, Seconds, Time
from kvctl.views.measuring.benchmark import Quantiles
from kvctl.views.registry import View
from kvctl.views.screen import Column, ScreenPart, TextTable, number, table

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


WayFigures = RecordedFigures | Variant
STAGES = ("queued", "handshake", "plan", "prepare", "post", "wire", "complete")


def replay_screen(body: Replay, wide: bool) -> ScreenPart:
    """The record in the first line, then one way a line; below what dominates and which is fastest."""
    head, *rest = replay_words(body)
    return [head, "", replay_table(body, wide), "", *rest]


def replay_words(body: Replay) -> list[str]:
    """How it was replayed; then what takes the time of each way, and which is fastest."""
    verified = all(one.verified for one in body.variants)
    conditions = f"{size(body.memory)} of memory, {body.cores} cores, load {body.load:.1f} at the beginning"
    compared = f"bytes were {'' if verified else 'not '}compared"
    moved = f"{body.recorded.transfers} transfers of {', '.join(body.models)}, {body.pace}"
    moved += f", from {body.to}" if body.to else ""
    lines = [f"{moved}; {conditions}; {compared}"]
    lines += [_where(one) for one in body.variants]
    if len(body.variants) > 1:
        best = next(one for one in body.variants if one.name == body.winner)
        first = body.variants[0]
        fastest = f"fastest: {best.name} with {rate(best.bytes_per_second)}"
        if best is not first and first.bytes_per_second:
            fastest += f", {best.bytes_per_second / first.bytes_per_second:.2f} of {first.name}"
        lines.append(fastest)
    lines += [f"not replayed: {one.transfers} {one.reason}" for one in body.left_out]
    return lines + list(body.notes)


def _where(one: Variant) -> str:
    return f"{one.name}: {one.dominant_share:.0%} of the time is in {one.dominant}; over {one.transport or 'unknown'}"


def replay_table(body: Replay, wide: bool) -> TextTable:
    """The record first, then one way a line."""
    first = body.variants[0].stages
    shown = [name for name in STAGES if name in body.recorded.stages or name in first]
    shown += [name for name in body.recorded.stages if name not in STAGES]
    return table(
        ways(body),
        Column("WAY", way_name),
        number("BYTES", lambda way: size(way.bytes)),
        number("COPIES", lambda way: way.descriptors),
        number("RATE", lambda way: rate(way.bytes_per_second or None)),
        number("P50", lambda way: span(way.seconds.p50)),
        number("P90", lambda way: span(way.seconds.p90)),
        number("P99", lambda way: span(way.seconds.p99)),
        *(_stage(name, wide) for name in shown),
    )


def ways(body: Replay) -> list[WayFigures]:
    """The record, then the ways in which it was replayed."""
    return [body.recorded, *body.variants]


def way_name(way: WayFigures) -> str:
    """What it is called."""
    return way.name if isinstance(way, Variant) else "recorded"


def _stage(name: str, wide: bool) -> Column[WayFigures]:
    """The middle of a stage; with the other two when wide."""

    def cell(way: WayFigures) -> str | None:
        if name not in way.stages:
            return None
        stage = way.stages[name]
        return " / ".join(map(span, (stage.p50, stage.p90, stage.p99))) if wide else span(stage.p50)

    return number(name.upper(), cell)


VIEWS = (View(Replay, replay_screen),)
