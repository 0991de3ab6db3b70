"""Draws the Trace and Traces documents."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from kvctl.cli.numbers import clock, size, span
from kvctl.views.table import column_table, pairs_table
from kvctl.views.trace import Trace, TraceEngine, Traces


def trace_screen(body: Trace, wide: bool) -> RenderableType:
    """The head, the engines, the pairs."""
    head = pairs_table(
        (
            ("trace", f"{body.name}, schema {body.schema}, by {body.written_by or 'somebody'}"),
            ("began", f"{clock(body.began)}, {span(body.seconds)} from first to last"),
            (
                "transfers",
                f"{body.transfers} of {body.requests} requests" + (", ids hashed" if body.hashed else ""),
            ),
        )
    )
    engines = column_table(
        ["ENGINE", "MODEL", "SHAPE", "WORKERS", "BLOCKS", "MEMORY", *(["GENERATION"] if wide else [])],
        [
            [
                engine.engine_id,
                engine.model or "-",
                _shape(engine),
                str(engine.workers) if engine.geometry else "unknown",
                str(engine.blocks) if engine.geometry else "-",
                size(engine.bytes) if engine.geometry else "-",
                *([engine.generation or "-"] if wide else []),
            ]
            for engine in body.engines
        ],
        right="WORKERS BLOCKS MEMORY",
    )
    pairs = column_table(
        ["FROM", "TO", "BACKEND", "MODE", "TRANSFERS", "MISSES", "REPLAYABLE", "BYTES", "TIME", "BLOCKS/RUN"],
        [
            [
                pair.remote_engine,
                pair.local_engine,
                pair.backend,
                pair.mode,
                str(pair.transfers),
                str(pair.misses),
                str(pair.replayable),
                size(pair.bytes),
                span(pair.seconds),
                f"{pair.blocks_per_run:.1f}",
            ]
            for pair in body.pairs
        ],
        right="TRANSFERS MISSES REPLAYABLE BYTES TIME BLOCKS/RUN",
    )
    return Group(head, Text(""), engines, Text(""), pairs)


def traces_screen(body: Traces, wide: bool) -> RenderableType:
    """One imported trace a line."""
    headers = ["TRACE", "SIZE", "IMPORTED", *(["PATH"] if wide else [])]
    rows = [
        [trace.name, size(trace.bytes), clock(trace.imported), *([trace.path] if wide else [])]
        for trace in body.traces
    ]
    return column_table(headers, rows, right="SIZE")


def _shape(engine: TraceEngine) -> str:
    parts = [("tp", engine.tp), ("pp", engine.pp), ("dcp", engine.dcp)]
    return " ".join(f"{name}{count}" for name, count in parts if count > 1 or name == "tp")
