"""Horizontal bars for the terminal; `kvctl.views.reports.bars` draws the same as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 50
"""Characters of the longest bar in a terminal."""


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


def _most(bars: Sequence[Bar]) -> float:
    return max((max(bar.value, bar.mark or 0.0) for bar in bars), default=0.0) or 1.0
