"""Figures and tables as docs/gpu.md writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

NOTHING = "Not measured.\n"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], nothing: str = NOTHING) -> str:
    """A table in Markdown, or ``nothing`` where it has no rows."""
    body = [f"| {' | '.join(map(str, row))} |" for row in rows]
    if not body:
        return nothing
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *body]) + "\n"


def ms(seconds: float | None) -> str:
    """Milliseconds with three digits that mean something."""
    if seconds is None:
        return ""
    value = 1e3 * seconds
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def size(value: float | None) -> str:
    """Bytes in MiB."""
    return "" if not value else f"{value / (1 << 20):.1f} MiB"


def ratio(value: float | None, base: float | None) -> str:
    """One over the other."""
    return "" if value is None or not base else f"{value / base:.2f}"
