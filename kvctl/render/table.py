"""Plain tables: upper-case headers, two spaces between columns, nothing cut where nobody looks at a screen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

STATE_STYLES = {
    "ready": "green",
    "alive": "green",
    "up": "green",
    "done": "green",
    "partial": "yellow",
    "silent": "yellow",
    "connecting": "yellow",
    "miss": "red",
    "gone": "red",
    "down": "red",
    "unreachable": "red",
}


def column_table(headers: Sequence[str], rows: Iterable[Sequence[str | Text]], right: str = "") -> Table:
    """A table of text cells. ``right`` names, separated by spaces, the headers of the columns of numbers.

    Only the columns of identifiers and prose fold on a narrow terminal; numbers and states never do.
    """
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    numbers = right.split()
    for header in headers:
        table.add_column(
            Text(header),
            justify="right" if header in numbers else "left",
            no_wrap=header not in FOLDING,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return table


FOLDING = frozenset(
    (
        "ENGINE",
        "MODEL",
        "REASON",
        "CAUSE",
        "REQUEST",
        "FROM",
        "TO",
        "PEERS",
        "STAGES",
        "SUBJECT",
        "SUMMARY",
        "MESSAGE",
    )
)
"""Headers whose cells may be folded onto a second line."""


def state(name: str) -> Text:
    """A state in its colour."""
    return Text(name, style=STATE_STYLES.get(name, ""))


def pairs_table(pairs: Iterable[tuple[str, str | Text]]) -> Table:
    """Names and values, one a line."""
    table = Table(box=None, show_edge=False, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(Text(name), value if isinstance(value, Text) else Text(value))
    return table
