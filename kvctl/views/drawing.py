"""Makes text of a view's parts: upper-case headers, two spaces between columns, nothing ever cut off.

All text of a view passes `_text`, which writes control characters out: ids and messages are chosen by others.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvctl.views.screen import Cell, Indented, Part, Styled, TextTable
from kvd.shown import escaped

if TYPE_CHECKING:
    from kvctl.cli.settings import Settings

PIPE_WIDTH = 100_000
"""Columns where stdout is no terminal, or -o wide was asked for: a line is then never folded."""
FOLDING = frozenset(
    ("ENGINE", "MODEL", "REASON", "CAUSE", "REQUEST", "FROM", "TO", "PEERS", "STAGES", "SUMMARY", "NOTE")
)
"""Headers of identifiers and prose, which may go on in a second line on a narrow terminal; numbers never do."""
_GAP = 2
"""Blanks between two columns."""
NARROWEST = 11
"""Characters that a folding column keeps at least: below that a table is harder to read than one that runs over."""


def drawn(screen: Part, settings: Settings) -> str:
    """The screen as lines of text, in colour where the settings and the terminal say so."""
    console = _console(settings)
    console.print(_renderable(screen, console.width), crop=False, overflow="fold")
    # rich fills every line up to its column's width; blanks at a line's end help nobody.
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


def _renderable(part: Part, width: int) -> RenderableType:
    if isinstance(part, str | Styled):
        return _text(part)
    if isinstance(part, TextTable):
        return _columns(part, width) if part.headers else _pairs(part)
    if isinstance(part, Indented):
        return Padding(_text(part.text), (0, 0, 0, 2))
    if callable(part):
        return _renderable(part(width), width)
    if isinstance(part, tuple):
        return Text.assemble(*map(_text, part))
    return Group(*(_renderable(one, width) for one in part))


def _text(cell: Cell) -> Text:
    if isinstance(cell, str):
        return Text(escaped(cell))
    return Text(escaped(cell.text), cell.style)


def _columns(table: TextTable, room: int) -> Table:
    """Folds long columns to fit the terminal, and runs over the edge where even that is not enough.

    A table squeezed by force would lose columns and characters; one that runs over can be piped to ``less -S``.
    """
    drawn = Table(box=None, show_edge=False, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    rows = [[_text(cell) for cell in row] for row in table.rows]
    longest = [max((cell_len(h), *(row[at].cell_len for row in rows))) for at, h in enumerate(table.headers)]
    folding = [header in FOLDING for header in table.headers]
    least = [min(width, NARROWEST) if fold else width for fold, width in zip(folding, longest, strict=True)]
    gaps = _GAP * (len(longest) - 1)
    whole = sum(longest) + gaps
    drawn.width = min(room, whole) if sum(least) + gaps <= room else whole
    for at, header in enumerate(table.headers):
        drawn.add_column(
            Text(header),
            justify="right" if header in table.right else "left",
            no_wrap=not folding[at],
            overflow="fold",
            min_width=least[at],
            # rich looks at every word of every cell, three times, to find a width that it is not told.
            width=longest[at] if whole <= drawn.width else None,
        )
    for row in rows:
        drawn.add_row(*row)
    return drawn


def _pairs(table: TextTable) -> Table:
    drawn = Table(box=None, show_edge=False, show_header=False, pad_edge=False, padding=(0, _GAP, 0, 0))
    drawn.add_column(style="bold", no_wrap=True)
    drawn.add_column(overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(_text, row))
    return drawn


def _console(settings: Settings) -> Console:
    terminal = sys.stdout.isatty()
    coloured = settings.color == "always" or (settings.color == "auto" and terminal)
    return Console(
        file=io.StringIO(),
        force_terminal=coloured,
        no_color=not coloured,
        color_system="standard" if coloured else None,
        width=None if terminal and settings.output != "wide" else PIPE_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=False,
    )
