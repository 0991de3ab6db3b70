"""Draws the Benchmark document: a table, bars for the terminal, a page of HTML."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from kvctl.cli.numbers import rate, size, span
from kvctl.views.bars import Bar, bars_text, page
from kvctl.views.benchmark import Benchmark, Measurement
from kvctl.views.table import column_table

SHORT = {"memcpy": "MEMCPY", "large": "LARGE", "tcp": "TCP"}


def benchmark_screen(body: Benchmark, wide: bool) -> RenderableType:
    """One measurement a line; below it warnings and what was left out."""
    headers, rows = _table(body, wide)
    right = "TOKENS AT-A-TIME BYTES COPIES RATE " + " ".join(headers)
    table = column_table(headers, rows, right=right.replace("BACKEND OP", ""))
    lines = [Text(line) for line in _head(body)]
    lines += [Text(f"{one.code}: {one.message}", style="yellow") for one in body.warnings]
    lines += [Text(f"not measured: {note}") for note in body.notes]
    return Group(lines[0], Text(""), table, Text(""), *lines[1:])


def benchmark_plot(body: Benchmark) -> str:
    """The rates as bars of text, each with the ceiling of one large transfer."""
    return "\n" + bars_text(_bars(body))


def benchmark_page(body: Benchmark) -> str:
    """The whole as one file of HTML."""
    headers, rows = _table(body, wide=True)
    return page(
        f"KV transfer of {body.model}",
        [*_head(body), *(f"{one.code}: {one.message}" for one in body.warnings)]
        + [f"Not measured: {note}" for note in body.notes],
        [("Rates", _bars(body))],
        (headers, rows),
    )


def _head(body: Benchmark) -> list[str]:
    pair = f"{body.local} reads from {body.remote}: {body.local_rank} from {', '.join(body.remote_ranks)}"
    verified = all(row.verified for row in body.measurements)
    compared = f"bytes were {'' if verified else 'not '}compared"
    where = " and ".join(dict.fromkeys(body.devices)) + (f", the source at {body.to}" if body.to else "")
    return [
        f"{pair}, {size(body.memory)} of memory ({where}) in {body.blocks[0]} and {body.blocks[1]} blocks",
        f"{body.cores} cores, load {body.load:.1f} at the beginning, {span(body.seconds)} in all; {compared}",
    ]


def _table(body: Benchmark, wide: bool) -> tuple[list[str], list[list[str]]]:
    headers = ["BACKEND", "OP", "TOKENS", "AT-A-TIME", "BLOCKS", "BYTES", "COPIES", "RATE"]
    headers += [f"/{name}" for name in SHORT.values()]
    headers += ["PLAN", "PREPARE", "POST", "WIRE", "COMPLETE"]
    if wide:
        headers += ["P90", "P99", "CEILINGS", "TRANSPORT"]
    return headers, [_row(row, wide) for row in body.measurements]


def _row(row: Measurement, wide: bool) -> list[str]:
    cells = [
        row.backend,
        row.operation,
        str(row.tokens),
        str(row.concurrency),
        row.fragmentation,
        size(row.bytes),
        str(row.descriptors),
        rate(row.bytes_per_second),
        *(f"{ceiling.ratio:.2f}" for ceiling in row.ceilings),
        *(span(stage.p50) for stage in row.stages.values()),
    ]
    if wide:
        cells += [
            ", ".join(f"{name} {span(stage.p90)}" for name, stage in row.stages.items()),
            ", ".join(f"{name} {span(stage.p99)}" for name, stage in row.stages.items()),
            ", ".join(f"{ceiling.name} {rate(ceiling.bytes_per_second)}" for ceiling in row.ceilings),
            row.transport or "unknown",
        ]
    return cells


def _bars(body: Benchmark) -> list[Bar]:
    return [
        Bar(
            label=f"{row.backend} {row.operation}, {row.tokens} x {row.concurrency}, {row.fragmentation}",
            parts=(("rate", row.bytes_per_second),),
            text=rate(row.bytes_per_second),
            mark=next(c.bytes_per_second for c in row.ceilings if c.name == "large"),
        )
        for row in body.measurements
    ]
