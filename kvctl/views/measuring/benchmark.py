"""The Benchmark document: what `kvctl benchmark` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvctl.cli.numbers import rate, size, span
from kvctl.cli.units import BytesPerSecond, Count, Seconds, Time
from kvctl.ledger.statistics import quantile
from kvctl.views.measuring.bars import Bar, bars_text
from kvctl.views.registry import View
from kvctl.views.screen import Column, ScreenPart, Styled, TextTable, number, table
from kvd.geometry.rank import RankName

Ratio = Annotated[float, Meta(ge=0, description="of the rate to that ceiling, the median over the rounds")]


class Quantiles(Struct, frozen=True, kw_only=True):
    """Of one stage over all requests of all rounds; seconds."""

    p50: Seconds
    p90: Seconds
    p99: Seconds


def quantiles(seconds: Iterable[float]) -> Quantiles:
    """The nearest ranks: each is a value that was measured."""
    ordered = sorted(seconds)
    return Quantiles(p50=quantile(ordered, 0.5), p90=quantile(ordered, 0.9), p99=quantile(ordered, 0.99))


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


def benchmark_screen(body: Benchmark, wide: bool) -> ScreenPart:
    """One measurement a line; below it warnings and what was left out."""
    head, *lines = conditions(body)
    warnings = [Styled(f"{one.code}: {one.message}", "yellow") for one in body.warnings]
    notes = [f"not measured: {note}" for note in body.notes]
    return [head, "", figures(body.measurements, wide), "", *lines, *warnings, *notes]


def benchmark_plot(body: Benchmark) -> str:
    """The rates as bars of text; ``|`` and the second figure are the ceiling of one large transfer."""
    return "\n" + bars_text(rate_bars(body.measurements))


def conditions(body: Benchmark) -> list[str]:
    """Who reads from whom, in how much memory, on how busy a machine."""
    pair = f"{body.local} reads from {body.remote}: {body.local_rank} from {', '.join(body.remote_ranks)}"
    verified = all(row.verified for row in body.measurements)
    compared = f"bytes were {'' if verified else 'not '}compared"
    where = " and ".join(dict.fromkeys(body.devices)) + (f", the source at {body.to}" if body.to else "")
    return [
        f"{pair}, {size(body.memory)} of memory ({where}) in {body.blocks[0]} and {body.blocks[1]} blocks",
        f"{body.cores} cores, load {body.load:.1f} at the beginning, {span(body.seconds)} in all; {compared}",
    ]


def figures(measurements: Sequence[Measurement], wide: bool) -> TextTable:
    """One measurement a line."""
    return table(
        measurements,
        Column("BACKEND", lambda row: row.backend),
        Column("OP", lambda row: row.operation),
        number("TOKENS", lambda row: row.tokens),
        number("AT-A-TIME", lambda row: row.concurrency),
        number("BLOCKS", lambda row: row.fragmentation),
        number("BYTES", lambda row: size(row.bytes)),
        number("COPIES", lambda row: row.descriptors),
        number("RATE", lambda row: rate(row.bytes_per_second)),
        *map(_ratio, ("memcpy", "large", "tcp")),
        *map(_stage, ("plan", "prepare", "post", "wire", "complete")),
        number(
            "P90", lambda row: _named((name, span(stage.p90)) for name, stage in row.stages.items()), wide
        ),
        number(
            "P99", lambda row: _named((name, span(stage.p99)) for name, stage in row.stages.items()), wide
        ),
        number(
            "CEILINGS", lambda row: _named((c.name, rate(c.bytes_per_second)) for c in row.ceilings), wide
        ),
        number("TRANSPORT", lambda row: row.transport or "unknown", wide),
    )


def _ratio(name: str) -> Column[Measurement]:
    return number(f"/{name.upper()}", lambda row: f"{ceiling(row, name).ratio:.2f}")


def ceiling(row: Measurement, name: str) -> Ceiling:
    """What the machine did at best beside a measurement."""
    return next(one for one in row.ceilings if one.name == name)


def _stage(name: str) -> Column[Measurement]:
    return number(name.upper(), lambda row: span(row.stages[name].p50))


def _named(figures: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {figure}" for name, figure in figures)


def rate_bars(measurements: Iterable[Measurement]) -> list[Bar]:
    """The rate of each, with that of one large transfer as its mark."""
    return [
        Bar(
            label=f"{row.backend} {row.operation}, {row.tokens} x {row.concurrency}, {row.fragmentation}",
            parts=(("rate", row.bytes_per_second),),
            text=f"{rate(row.bytes_per_second)} of {rate(ceiling(row, 'large').bytes_per_second)}",
            mark=ceiling(row, "large").bytes_per_second,
        )
        for row in measurements
    ]


def handshake_screen(body: HandshakeBenchmark, wide: bool) -> ScreenPart:
    """One case a line, by the sizes of the two engines."""
    cases = table(
        body.measurements,
        Column("RANKS", lambda row: f"{row.local_ranks} x {row.remote_ranks}"),
        Column("CASE", lambda row: row.case),
        number("P50", lambda row: span(row.each.p50)),
        number("P99", lambda row: span(row.each.p99)),
        number("ALL", lambda row: span(row.whole.p50)),
        number("CPU", lambda row: span(row.processor_seconds)),
        number("PER-SECOND", lambda row: f"{row.handshakes_per_second:.0f}"),
        number("P90", lambda row: span(row.each.p90), wide),
        number("ALL-P90", lambda row: span(row.whole.p90), wide),
        number("ALL-P99", lambda row: span(row.whole.p99), wide),
        number("ANSWER", lambda row: size(row.bytes), wide),
        number("ROUNDS", lambda row: row.rounds, wide),
    )
    head = (
        f"handshakes of engines of {body.model} over two kvds; {body.cores} cores, load {body.load:.1f} at the"
        f" beginning, {span(body.seconds)} in all"
    )
    return [head, "", cases]


VIEWS = (View(Benchmark, benchmark_screen), View(HandshakeBenchmark, handshake_screen))
