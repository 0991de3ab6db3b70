"""The Trace and Traces documents: what `kvctl trace show` and `import` print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from kvctl.cli.numbers import clock, size, span
from kvctl.cli.units import Bytes, Count, Seconds, Time, filled
from kvctl.views.registry import View, moment
from kvctl.views.screen import Column, ScreenPart, TextTable, facts, number, sizes, table

if TYPE_CHECKING:
    from kvd.trace import model


class TraceEngine(Struct, frozen=True, kw_only=True):
    """One generation of an engine in a trace."""

    engine_id: str
    generation: str
    model: str
    tp: Count
    pp: Count
    dcp: Count
    geometry: Annotated[bool, Meta(description="whether its geometry is in the trace")]
    workers: Count
    blocks: Annotated[Count, Meta(description="blocks of one worker")]
    bytes: Annotated[Bytes, Meta(description="KV memory of all workers, which a replay at full size needs")]


class TracePair(Struct, frozen=True, kw_only=True):
    """The transfers between two engines of a trace."""

    remote_engine: str
    local_engine: str
    backend: str
    mode: str
    transfers: Count
    misses: Count
    replayable: Annotated[Count, Meta(description="those that kvctl replay can move again")]
    bytes: Bytes
    seconds: Annotated[Seconds, Meta(description="all stages of all transfers together, in seconds")]
    blocks_per_run: Annotated[
        float, Meta(ge=0, description="how many neighbouring blocks a run has on average, over both sides")
    ]


class Trace(Struct, frozen=True, kw_only=True):
    """What one trace holds."""

    name: str
    schema: Count
    written_by: str
    began: Time
    seconds: Annotated[
        Seconds, Meta(description="from the first transfer's start to the last one's, in seconds")
    ]
    hashed: Annotated[bool, Meta(description="ids of requests are digests")]
    transfers: Count
    requests: Count
    engines: tuple[TraceEngine, ...]
    pairs: tuple[TracePair, ...]


class KeptTrace(Struct, frozen=True, kw_only=True):
    """One imported trace."""

    name: str
    bytes: Annotated[Bytes, Meta(description="of the file, packed")]
    imported: Time
    path: str


class Traces(Struct, frozen=True, kw_only=True):
    """The imported traces, by name."""

    traces: tuple[KeptTrace, ...]


@dataclass
class _Sums:
    transfers: int = 0
    misses: int = 0
    replayable: int = 0
    bytes: int = 0
    seconds: float = 0.0
    runs: int = 0
    blocks: int = 0


def trace_document(trace: model.RecordedTrace, transfers: Iterable[model.TransferLine], name: str) -> Trace:
    """The document of a trace whose transfers may come one by one."""
    from kvd.trace.model import obstacles  # brings numpy

    pairs: dict[tuple[int, int, str, str], _Sums] = {}
    requests: set[str] = set()
    count, last = 0, 0.0
    obstacle = obstacles(trace)
    for one in transfers:
        count += 1
        last = max(last, one.at)
        requests.add(one.request)
        sums = pairs.setdefault((one.remote, one.local, one.backend, one.mode), _Sums())
        sums.transfers += 1
        sums.misses += one.state == "miss"
        sums.replayable += not obstacle(one)
        sums.bytes += one.bytes
        sums.seconds += sum(one.stages.values())
        for blocks in (*one.local_blocks, *one.remote_blocks):
            sums.runs += len(blocks.runs)
            sums.blocks += blocks.count
    return Trace(
        name=name,
        schema=trace.header.schema,
        written_by=trace.header.written_by,
        began=moment(trace.header.began),
        seconds=last,
        hashed=trace.header.hashed,
        transfers=count,
        requests=len(requests),
        engines=tuple(map(_engine, trace.engines)),
        pairs=tuple(_pair(trace, key, sums) for key, sums in pairs.items()),
    )


def traces_document(kept: Mapping[str, Path]) -> Traces:
    """The document of the imported traces."""
    return Traces(
        traces=tuple(
            KeptTrace(
                name=name, bytes=path.stat().st_size, imported=moment(path.stat().st_mtime), path=str(path)
            )
            for name, path in kept.items()
        )
    )


def _engine(engine: model.TracedEngine) -> TraceEngine:
    line, workers = engine.line, engine.geometry.workers if engine.geometry else ()
    return filled(
        TraceEngine,
        line,
        geometry=bool(workers),
        workers=len(workers),
        blocks=max((w.num_blocks for w in workers), default=0),
        bytes=sum(region.length for w in workers for region in w.regions),
    )


def _pair(trace: model.RecordedTrace, key: tuple[int, int, str, str], sums: _Sums) -> TracePair:
    return filled(
        TracePair,
        sums,
        remote_engine=trace.engines[key[0]].line.engine_id,
        local_engine=trace.engines[key[1]].line.engine_id,
        backend=key[2],
        mode=key[3],
        blocks_per_run=sums.blocks / sums.runs if sums.runs else 0.0,
    )


def trace_screen(body: Trace, wide: bool) -> ScreenPart:
    """The head, the engines, the pairs."""
    head = facts(
        ("trace", f"{body.name}, schema {body.schema}, by {body.written_by or 'somebody'}"),
        ("began", f"{clock(body.began)}, {span(body.seconds)} from first to last"),
        ("transfers", f"{body.transfers} of {body.requests} requests{', ids hashed' if body.hashed else ''}"),
    )
    engines = table(
        body.engines,
        Column("ENGINE", lambda e: e.engine_id),
        Column("MODEL", lambda e: e.model or "-"),
        Column("SHAPE", lambda e: sizes(tp=e.tp, pp=e.pp, dcp=e.dcp) if e.geometry else "unknown"),
        number("WORKERS", lambda e: e.workers if e.geometry else "unknown"),
        number("BLOCKS", lambda e: e.blocks if e.geometry else "-"),
        number("MEMORY", lambda e: size(e.bytes) if e.geometry else "-"),
        Column("GENERATION", lambda e: e.generation or "-", wide),
    )
    return [head, "", engines, "", pairs_table(body)]


def pairs_table(body: Trace) -> TextTable:
    """Which engines moved what to each other."""
    return table(
        body.pairs,
        Column("FROM", lambda pair: pair.remote_engine),
        Column("TO", lambda pair: pair.local_engine),
        Column("BACKEND", lambda pair: pair.backend),
        Column("MODE", lambda pair: pair.mode),
        number("TRANSFERS", lambda pair: pair.transfers),
        number("MISSES", lambda pair: pair.misses),
        number("REPLAYABLE", lambda pair: pair.replayable),
        number("BYTES", lambda pair: size(pair.bytes)),
        number("TIME", lambda pair: span(pair.seconds)),
        number("BLOCKS/RUN", lambda pair: f"{pair.blocks_per_run:.1f}"),
    )


def traces_screen(body: Traces, wide: bool) -> ScreenPart:
    """One imported trace a line."""
    return table(
        body.traces,
        Column("TRACE", lambda trace: trace.name),
        number("SIZE", lambda trace: size(trace.bytes)),
        Column("IMPORTED", lambda trace: clock(trace.imported)),
        Column("PATH", lambda trace: trace.path, wide),
    )


VIEWS = (View(Trace, trace_screen), View(Traces, traces_screen, "traces", KeptTrace))
