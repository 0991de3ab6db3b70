"""Plain tables: upper-case headers, two spaces between columns, nothing ever cut off."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
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
    "recovered": "green",
    "ordered": "yellow",
    "forced": "yellow",
    "reported": "yellow",
    "rescheduled": "yellow",
    "late": "red",
    "over": "red",
    "miss": "red",
    "gone": "red",
    "down": "red",
    "unreachable": "red",
}

FOLDING = frozenset(
    ("ENGINE", "MODEL", "REASON", "CAUSE", "REQUEST", "FROM", "TO", "PEERS", "STAGES", "SUMMARY", "NOTE")
)
"""Headers of identifiers and prose, which may go on in a second line on a narrow terminal; numbers never do."""
_GAP = 2
"""Blanks between two columns."""
NARROWEST = 11
"""Characters that a folding column keeps at least: below that a table is harder to read than one that runs over."""


class Sheet:
    """A table that folds its long columns to fit the terminal, and runs over the edge where even that is not enough.

    A table squeezed by force would lose columns and characters; one that runs over can be piped to ``less -S``.
    """

    def __init__(self, table: Table, longest: Sequence[int]) -> None:
        """``longest`` is the widest cell of each column."""
        self.table = table
        self._longest = longest

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, as wide as it must be."""
        gaps = _GAP * (len(self._longest) - 1)
        whole = sum(self._longest) + gaps
        least = sum(column.min_width or 0 for column in self.table.columns) + gaps
        width = min(options.max_width, whole) if least <= options.max_width else whole
        for column, longest in zip(self.table.columns, self._longest, strict=True):
            # rich looks at every word of every cell, three times, to find a width that it is not told.
            column.width = longest if whole <= width else None
        yield from console.render(self.table, options.update(max_width=width))


def column_table(headers: Sequence[str], rows: Iterable[Sequence[str | Text]], right: str = "") -> Sheet:
    """A table of text cells. ``right`` names, separated by spaces, the headers of the columns of numbers."""
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    lines = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    numbers = right.split()
    widths = [
        max((cell_len(header), *(line[position].cell_len for line in lines)))
        for position, header in enumerate(headers)
    ]
    for header, longest in zip(headers, widths, strict=True):
        folds = header in FOLDING
        table.add_column(
            Text(header),
            justify="right" if header in numbers else "left",
            no_wrap=not folds,
            overflow="fold",
            min_width=min(longest, NARROWEST) if folds else longest,
        )
    for line in lines:
        table.add_row(*line)
    return Sheet(table, widths)


def state(name: str) -> Text:
    """A state in its colour."""
    return Text(name, style=STATE_STYLES.get(name, ""))


def pairs_table(pairs: Iterable[tuple[str, str | Text]]) -> Table:
    """Names and values, one a line."""
    table = Table(box=None, show_edge=False, show_header=False, pad_edge=False, padding=(0, _GAP, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(Text(name), value if isinstance(value, Text) else Text(value))
    return table
