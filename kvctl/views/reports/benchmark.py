"""The report of `kvctl benchmark`."""

from __future__ import annotations

from kvctl.views.measuring.benchmark import Benchmark, ceiling, conditions, figures, rate_bars
from kvctl.views.reports.bars import bars_html
from kvctl.views.reports.page import Section, origin, page, table_html


def benchmark_page(body: Benchmark) -> str:
    """The whole as one file of HTML: what is furthest from what the machine can do comes first."""
    worst = sorted(body.measurements, key=lambda row: ceiling(row, "large").ratio)
    pair, machine = conditions(body)
    found = [f"{one.code}: {one.message}" for one in body.warnings]
    return page(
        f"KV transfer of {body.model}",
        [*origin(body.started, body.seconds), ("Engines", pair), ("Machine", machine)],
        found + [f"Not measured: {note}" for note in body.notes],
        [
            Section(
                "Rates, those first that are furthest below one large transfer (the line)",
                bars_html(rate_bars(worst)),
            ),
            Section("All figures", table_html(figures(worst, wide=True))),
        ],
    )
