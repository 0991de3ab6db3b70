"""Horizontal bars, for the terminal and as SVG, and the self-contained page of HTML around them."""

from __future__ import annotations

import platform
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

from kvctl.views.screen import TextTable
from kvd.backends.registry import ADAPTERS
from kvd.installed import installed_version, own_version

WIDTH = 50
"""Characters of the longest bar in a terminal."""
PIXELS, LABEL, ROW = 1000, 330, 22
LEGEND_STEP = 110
LEGEND = (PIXELS - LABEL) // LEGEND_STEP
"""Names in a row of the legend."""
COLORS = ("#2563eb", "#f59e0b", "#10b981", "#8b5cf6", "#ef4444", "#64748b", "#06b6d4")
STYLE = (
    "body{font-family:'DejaVu Sans',Verdana,sans-serif;font-size:14px;color:#0f172a;max-width:1200px;margin:2em auto;"
    "padding:0 1em}table{border-collapse:collapse;font-size:12px}td,th{padding:3px 10px 3px 0;text-align:left;"
    "border-bottom:1px solid #e2e8f0;vertical-align:top}.wide{overflow-x:auto}svg text{font-size:12px;fill:#0f172a}"
)


@dataclass(frozen=True)
class Bar:
    """One bar: its parts (name, value) one after the other, what stands behind it, a mark to compare with."""

    label: str
    parts: tuple[tuple[str, float], ...]
    text: str
    mark: float | None = None

    @property
    def value(self) -> float:
        """All parts together."""
        return sum(value for _, value in self.parts)


def bars_text(bars: Sequence[Bar]) -> str:
    """One bar a line; ``|`` stands where the mark is."""
    most, wide = _most(bars), max((len(bar.label) for bar in bars), default=0)
    lines = []
    for bar in bars:
        drawn = list(("█" * round(WIDTH * bar.value / most)).ljust(WIDTH + 1))
        if bar.mark is not None:
            drawn[min(WIDTH, round(WIDTH * bar.mark / most))] = "|"
        lines.append(f"{bar.label:{wide}}  {''.join(drawn)}  {bar.text}".rstrip() + "\n")
    return "".join(lines)


def bars_svg(bars: Sequence[Bar]) -> str:
    """The same as a drawing; a line stands where the mark is, each part has its name and value as a tooltip."""
    most, room = _most(bars), PIXELS - LABEL - 120
    names = list(dict.fromkeys(name for bar in bars for name, _ in bar.parts))
    colors = dict(zip(names, COLORS * (1 + len(names) // len(COLORS)), strict=False))
    head = ROW * -(-len(names) // LEGEND) if len(names) > 1 else 0
    height = head + ROW * len(bars) + 6
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PIXELS} {height}" width="{PIXELS}">']
    if head:
        for at, name in enumerate(names):
            x, y = LABEL + LEGEND_STEP * (at % LEGEND), 4 + ROW * (at // LEGEND)
            parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colors[name]}"/>')
            parts.append(f'<text x="{x + 16}" y="{y + 11}">{escape(name)}</text>')
    for number, bar in enumerate(bars):
        y = head + ROW * number
        parts.append(f'<text x="{LABEL - 8}" y="{y + 15}" text-anchor="end">{escape(bar.label)}</text>')
        end = float(LABEL)
        for name, value in bar.parts:
            width = room * value / most
            title = escape(f"{name}: {value:g}")
            parts.append(
                f'<rect x="{end:.1f}" y="{y + 3}" width="{width:.1f}" height="{ROW - 6}" fill="{colors[name]}">'
                f"<title>{title}</title></rect>"
            )
            end += width
        if bar.mark is not None:
            at_mark = LABEL + room * bar.mark / most
            parts.append(f'<path d="M{at_mark:.1f} {y + 1}v{ROW - 2}" stroke="#0f172a" stroke-width="2"/>')
            end = max(end, at_mark)
        parts.append(f'<text x="{end + 6:.1f}" y="{y + 15}">{escape(bar.text)}</text>')
    return "".join((*parts, "</svg>"))


def page(
    title: str,
    paragraphs: Sequence[str],
    charts: Sequence[tuple[str, Sequence[Bar]]],
    table: TextTable,
    started: datetime,
) -> str:
    """A page that needs nothing but itself. It says when, where, with what and by which command it was made."""
    head = "".join(f"<th>{escape(header)}</th>" for header in table.headers)
    lines = "".join(
        f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>\n" for row in table.rows
    )
    drawn = "".join(f"<h2>{escape(name)}</h2>\n{bars_svg(bars)}\n" for name, bars in charts)
    told = "".join(f"<p>{escape(text)}</p>\n" for text in (*paragraphs, *_origin(started)))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n{told}{drawn}"
        f'<h2>All figures</h2>\n<div class="wide"><table><tr>{head}</tr>\n{lines}</table></div>\n</body></html>\n'
    )


def _origin(started: datetime) -> tuple[str, str]:
    engines = {
        name: installed_version(one.distributions, "") for name, one in ADAPTERS.items() if one.distributions
    }
    versions = {"kvctl": own_version(), "Python": platform.python_version(), **engines}
    told = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return (
        f"{started.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC on {socket.gethostname()}, with {told}.",
        f"Made by: {shlex.join(['kvctl', *sys.argv[1:]])}",
    )


def _most(bars: Sequence[Bar]) -> float:
    return max((max(bar.value, bar.mark or 0.0) for bar in bars), default=0.0) or 1.0
