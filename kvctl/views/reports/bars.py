"""Horizontal bars as HTML, and the colours of their parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvctl.views.measuring.bars import Bar
from kvctl.views.reports.page import plain

COLORS = {
    "rate": "c0", "post": "c0", "prepare": "c1", "wire": "c2", "handshake": "c3", "complete": "c4", "queued": "c5",
    "plan": "c6", "other": "c1 striped", "claim": "c5 striped", "announce": "c3 striped", "wait": "c6 striped",
}  # fmt: skip
"""The classes of a stage's colour, the same in every chart (report.css)."""
ANY_OTHER = "c4 striped"


def bars_html(bars: Sequence[Bar]) -> str:
    """One bar a line, below a legend where a bar has several parts; a line stands where the mark is."""
    most = max((max(bar.value, bar.mark or 0.0) for bar in bars), default=0.0) or 1.0
    names = dict.fromkeys(name for bar in bars for name, _ in bar.parts)
    lines = "".join(
        f'<div class="bar"><span>{plain(bar.label)}</span>{track_html(bar.parts, most, bar.mark)}'
        f"<span>{plain(bar.text)}</span></div>\n"
        for bar in bars
    )
    return f"{legend_html(names) if len(names) > 1 else ''}{lines}"


def track_html(parts: Sequence[tuple[str, float]], most: float, mark: float | None = None) -> str:
    """The bar itself, its parts (name, value) one behind the other; ``most`` fills its track.

    Each part has its name and value as a tooltip.
    """
    drawn = "".join(
        f'<i class="{COLORS.get(name, ANY_OTHER)}" style="width:{100 * value / most:.2f}%"'
        f' title="{plain(name)}: {value:g}"></i>'
        for name, value in parts
        if value > 0
    )
    line = "" if mark is None else f'<b style="left:min({100 * mark / most:.2f}%, 100% - 2px)"></b>'
    return f'<div class="track">{drawn}{line}</div>'


def legend_html(names: Iterable[str]) -> str:
    """What each colour means."""
    entries = "".join(
        f'<li><i class="{COLORS.get(name, ANY_OTHER)}"></i>{plain(name)}</li>' for name in names
    )
    return f'<ul class="legend">{entries}</ul>\n'
