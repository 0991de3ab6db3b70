"""The report of `kvctl replay`."""

from __future__ import annotations

from collections.abc import Mapping

from kvctl.cli.numbers import rate, span
from kvctl.views.measuring.bars import Bar
from kvctl.views.measuring.replay import (
    STAGES,
    Replay,
    WayFigures,
    replay_table,
    replay_words,
    way_name,
    ways,
)
from kvctl.views.reports.bars import bars_html
from kvctl.views.reports.page import Section, origin, page, table_html
from kvctl.views.reports.trace import engines_html, record_facts, reported
from kvctl.views.reports.transfers import transfer_sections
from kvd.trace.model import RecordedTrace


def replay_page(body: Replay, trace: RecordedTrace, again: Mapping[int, Mapping[str, float]]) -> str:
    """The whole as one file of HTML.

    ``again`` has the seconds that a transfer took with each way, by its place in the trace.
    """
    conditions, *found = replay_words(body)
    figures = ways(body)
    rates = [
        Bar(way_name(way), (("rate", way.bytes_per_second),), rate(way.bytes_per_second)) for way in figures
    ]
    return page(
        f"Replay of {body.trace}",
        [
            *origin(body.started, body.took),
            *record_facts(trace.header, trace.transfers),
            ("Replayed", conditions),
        ],
        found,
        [
            *transfer_sections(reported(trace, trace.transfers, again)),
            Section(
                "The middle of each stage; beside it the middle of whole transfers",
                bars_html([_stages(way) for way in figures]),
            ),
            Section("Rates", bars_html(rates)),
            Section("All figures", table_html(replay_table(body, wide=True))),
            Section("Engines", engines_html(trace.engines)),
        ],
    )


def _stages(way: WayFigures) -> Bar:
    """The middles of the stages side by side. They add up to no transfer's time, so that is written beside them."""
    parts = tuple((stage, way.stages[stage].p50) for stage in STAGES if stage in way.stages)
    return Bar(way_name(way), parts, f"a transfer {span(way.seconds.p50)}")
