"""Transfers on a time axis, and the worst of them one by one, worst first."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvctl.cli.numbers import size, span
from kvctl.views.registry import moment
from kvctl.views.reports.bars import legend_html, track_html
from kvctl.views.reports.page import Section, plain

WORST = 10
"""Transfers that are shown one by one."""
WORST_MISSES = 5
"""Of these at most so many misses, where enough others are to be shown."""
COLUMNS, ROWS = 300, 60
"""Dots that can be told apart: transfers in one place are one dot."""
LEAST = 1e-6
"""Seconds of the shortest transfer that has a place of its own on the axis."""


@dataclass(frozen=True)
class ReportedTransfer:
    """One worker's part of one request: who, when (Unix seconds), how long, how it ended, how long it took again."""

    request: str
    source: str
    reader: str
    rank: str
    how: str
    began: float
    stages: Mapping[str, float]
    bytes: int
    copies: int
    tokens: int
    missed: str = ""
    again: tuple[tuple[str, float], ...] = field(default=())

    @property
    def seconds(self) -> float:
        """All stages together."""
        return sum(self.stages.values())


def worst_first(transfers: Iterable[ReportedTransfer]) -> list[ReportedTransfer]:
    """The longest misses, then the longest of the others."""
    longest = sorted(transfers, key=lambda one: -one.seconds)
    missed = [one for one in longest if one.missed]
    done = [one for one in longest if not one.missed]
    misses = missed[: max(WORST_MISSES, WORST - len(done))]
    return misses + done[: WORST - len(misses)]


def transfer_sections(transfers: Sequence[ReportedTransfer]) -> Iterator[Section]:
    """The axis, and the worst ones below it."""
    if not transfers:
        return
    worst = worst_first(transfers)
    missed = sum(bool(one.missed) for one in transfers)
    told = f"{len(transfers)} transfers" + (f", {missed} of them misses (squares)" if missed else "")
    yield Section(
        "When transfers began, and how long each took",
        f"<p>{plain(told)}. Times are UTC. The {len(worst)} worst are ringed and lead to their lines below.</p>\n"
        f"{_axis(transfers, worst)}",
    )
    longest = max((one.seconds for one in worst), default=0.0) or 1.0
    names = dict.fromkeys(name for one in worst for name, seconds in one.stages.items() if seconds > 0)
    rows = "".join(_row(number, one, longest) for number, one in enumerate(worst, 1))
    yield Section(
        f"The worst {len(worst)}" if len(worst) > 1 else "The transfer",
        f'<p>A bar that fills its line takes {span(longest)}.</p>\n{legend_html(names)}<ol class="worst">\n{rows}</ol>',
    )


def _axis(transfers: Sequence[ReportedTransfer], worst: Sequence[ReportedTransfer]) -> str:
    """Across: when it began. Upwards: how long it took, ten times as long with each line."""
    first, last = (of(one.began for one in transfers) for of in (min, max))
    low, high = (math.log10(max(LEAST, of(one.seconds for one in transfers))) for of in (min, max))
    bottom, top = math.floor(low), max(math.ceil(high), math.floor(low) + 1)

    def place(one: ReportedTransfer) -> tuple[float, float]:
        across = (one.began - first) / (last - first) if last > first else 0.5
        return across, (math.log10(max(LEAST, one.seconds)) - bottom) / (top - bottom)

    cells: dict[tuple[int, int, bool], list[ReportedTransfer]] = defaultdict(list)
    for one in transfers:
        across, up = place(one)
        cells[round(across * COLUMNS), round(up * ROWS), bool(one.missed)].append(one)
    dots = [
        f"<i{_missed(missed)} {_at(across / COLUMNS, up / ROWS)}"
        f' title="{plain(_hint(of[0]))}{f" and {len(of) - 1} more" if of[1:] else ""}"></i>'
        for (across, up, missed), of in cells.items()
    ]
    dots += [
        f'<a href="#worst-{number}"{_missed(bool(one.missed))} {_at(*place(one))}'
        f' title="{number}: {plain(_hint(one))}"></a>'
        for number, one in reversed([*enumerate(worst, 1)])
    ]
    heights = [(n - bottom) / (top - bottom) for n in range(bottom, top + 1)]
    lines = "".join(f'<hr style="bottom:{100 * height:.2f}%">' for height in heights[1:])
    ups = "".join(
        f'<span style="bottom:{100 * height:.2f}%">{span(10.0**n)}</span>'
        for n, height in zip(range(bottom, top + 1), heights, strict=True)
    )
    alongs = "".join(
        f'<span style="left:{25 * quarter}%">{_clock(first + (last - first) * quarter / 4, last - first)}</span>'
        for quarter in (range(5) if last > first else range(1))
    )
    return (
        f'<div class="plot"><div class="up">{ups}</div><div class="field">{lines}{"".join(dots)}</div>'
        f'<div class="along">{alongs}</div></div>'
    )


def _at(across: float, up: float) -> str:
    return f'style="left:{100 * across:.2f}%;bottom:{100 * up:.2f}%"'


def _missed(missed: bool) -> str:
    return ' class="missed"' if missed else ""


def _hint(one: ReportedTransfer) -> str:
    return f"{one.request} {one.rank}, {span(one.seconds)}{f', {one.missed}' if one.missed else ''}"


def _clock(unix: float, length: float) -> str:
    """A moment of the axis: the longer the axis, the coarser; with the day where it is longer than one."""
    if length >= 86400:
        return f"{moment(unix):%m-%d %H:%M}"
    exact = moment(unix).strftime("%H:%M:%S.%f")
    return exact[:-3] if length < 10 else exact[:8]


def _row(number: int, one: ReportedTransfer, longest: float) -> str:
    """One of the worst: what is known of it, its stages as a bar, and what takes the time."""
    began = f"{moment(one.began):%Y-%m-%d %H:%M:%S.%f}"[:-3]
    stages = sorted(one.stages.items(), key=lambda stage: -stage[1])
    taken = ", ".join(f"{name} {span(seconds)}" for name, seconds in stages if seconds > 0)
    again = ", ".join(f"{name} {span(seconds)}" for name, seconds in one.again)
    missed = f' <span class="bad">missed: {plain(one.missed)}</span>' if one.missed else ""
    moved = f"{size(one.bytes)} in {one.copies} copies, {one.tokens} tokens, {one.how}"
    return (
        f'<li id="worst-{number}"><b>{number}. {span(one.seconds)}</b>{missed} <code>{plain(one.request)}</code><br>'
        f"{plain(one.source)} to {plain(one.reader)} {plain(one.rank)}, {began} UTC"
        f"{track_html(tuple(one.stages.items()), longest)}"
        f'<span class="dim">{plain(taken)}; {plain(moved)}</span>'
        f"{f'<br>again: {plain(again)}' if again else ''}</li>\n"
    )
