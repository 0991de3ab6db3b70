"""Makes text of a view's parts: upper-case headers, two spaces between columns, nothing ever cut off.

What somebody may copy is never broken, however narrow the terminal: ids, paths and commands to type.
All text of a view passes `_text`, which writes control characters out: ids and messages are chosen by others.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from kvctl.views.screen import Cell, Foldable, Indented, ScreenPart, Styled, TextTable
from kvd.shown import escaped

if TYPE_CHECKING:
    from kvctl.cli.settings import Settings

PIPE_WIDTH = 100_000
"""Columns where stdout is no terminal, or -o wide was asked for: a line is then never folded."""
PROSE = frozenset(("REASON", "CAUSE", "PEERS", "STAGES", "SUMMARY", "NOTE"))
"""Headers of columns that may go on in a second line on a narrow terminal, between two words."""
IDS = frozenset(("ENGINE", "MODEL", "REQUEST", "FROM", "TO", "KEY"))
"""Headers of columns that may stand below the others instead, each in a line of its own and whole."""
NARROWEST = 11
"""Characters that a column of prose keeps at least: below that a table is harder to read than one that runs over."""
WORD = re.compile(
    r"""["'(]*(?:`[^`]*`|\b(?:kvctl|kvd --|systemctl|journalctl|chown|chmod|mkdir|touch|sudo) [^;,`]*)\S*\s*|\S+\s*"""
)
"""A word, or what is to be typed as messages and hints have it: up to the next comma, semicolon, or their end."""
_GAP = 2
"""Blanks between two columns."""


def drawn(screen: ScreenPart, settings: Settings) -> str:
    """The screen as lines of text, in colour where the settings and the terminal say so."""
    console = _console(settings)
    lines = [*_lines(screen, console)]
    if not lines:
        return ""
    console.print(Text("\n").join(lines), crop=False, no_wrap=True, overflow="ignore")
    # Columns are filled up to their width; blanks at a line's end help nobody.
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


def as_text(screen: ScreenPart, width: int) -> Text:
    """The screen for a terminal of so many columns, as text with styles."""
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False)
    return Text("\n").join(_lines(screen, console))


def _lines(part: ScreenPart, console: Console, indent: int = 0) -> Iterator[Text]:
    if isinstance(part, TextTable):
        yield from _columns(part, console) if part.headers else _pairs(part, console)
    elif isinstance(part, Foldable):
        yield from _lines(part.whole, console)
    elif isinstance(part, Indented):
        yield from _lines(part.text, console, _GAP)
    elif callable(part):
        yield from _lines(part(console.width), console)
    elif isinstance(part, str | Styled | tuple):
        text = _text(part) if isinstance(part, str | Styled) else Text.assemble(*map(_text, part))
        for line in _wrapped(text, console.width - indent):
            line.pad_left(indent)
            yield line
    else:
        for one in part:
            yield from _lines(one, console)


def _text(cell: Cell) -> Text:
    if isinstance(cell, str):
        return Text(escaped(cell))
    return Text(escaped(cell.text), cell.style)


def _wrapped(text: Text, width: int) -> list[Text]:
    """Lines of about ``width`` columns, ended between words. A longer word, and a command, runs over."""
    if text.cell_len <= width:
        return [text]
    ends, used = [], 0
    for word in WORD.finditer(text.plain):
        if used and used + cell_len(word[0].rstrip()) > max(width, NARROWEST):
            ends.append(word.start())
            used = 0
        used += cell_len(word[0])
    lines = list(text.divide(ends))
    for line in lines:
        line.rstrip()
    return lines


def _columns(table: TextTable, console: Console) -> Iterator[Text]:
    """Makes a table fit the terminal: prose goes on in a second line, ids go below their row.

    Where even that is not enough the last columns go below each row, with their headers. Only a first column that is
    wider than the terminal runs over its edge: nothing is ever lost.
    """
    heads = [Text(header, "bold") for header in table.headers]
    rows = [[_text(cell) for cell in row] for row in table.rows]
    longest = [
        max(column)
        for column in zip(*([cell.cell_len for cell in row] for row in (heads, *rows)), strict=True)
    ]
    least = [
        min(longest[at], max(NARROWEST, _longest_word(at, rows)) if at + 1 < len(heads) else NARROWEST)
        if header in PROSE
        else longest[at]
        for at, header in enumerate(table.headers)
    ]
    # A cell of several words is no id.
    names = [
        "" if any(" " in row[at].plain for row in rows) else header for at, header in enumerate(table.headers)
    ]
    below = _below(names, least, console.width)
    beside, named = _named_below([at for at in range(len(heads)) if at not in below], least, console.width)
    room = console.width - _GAP * (len(beside) - 1) - sum(least[at] for at in beside)
    widths = list(longest if room < 0 else least)
    if room >= 0:
        growing = sorted(beside, key=lambda at: longest[at] - least[at])
        for left, at in zip(range(len(growing), 0, -1), growing, strict=True):
            more = min(longest[at] - least[at], room // left)
            widths[at], room = widths[at] + more, room - more
    for row in (heads, *rows):
        cells = [_wrapped(row[at], widths[at]) for at in beside]
        for number in range(max(map(len, cells))):
            line = Text()
            for at, cell in zip(beside, cells, strict=True):
                text = cell[number] if number < len(cell) else Text()
                blanks = " " * (widths[at] - text.cell_len)
                right = table.headers[at] in table.right
                line.append(blanks * right).append_text(text).append(blanks * (not right) + " " * _GAP)
            yield line
        for at in below:
            yield Text(" " * _GAP).append_text(row[at])
        if row is not heads:
            yield from _with_names([(heads[at], row[at]) for at in named], console.width)


def _below(headers: Sequence[str], least: Sequence[int], room: int) -> list[int]:
    """The columns of ids that go below the others, so that these fit: the longest. None where that does not help."""
    ids = sorted((at for at, header in enumerate(headers) if header in IDS), key=lambda at: -least[at])
    for count in range(len(ids) + 1):
        kept = [width for at, width in enumerate(least) if at not in ids[:count]]
        if kept and sum(kept) + _GAP * (len(kept) - 1) <= room:
            return sorted(ids[:count])
    return []


def _named_below(beside: list[int], least: Sequence[int], room: int) -> tuple[list[int], list[int]]:
    """The columns that fit beside each other, the first one at least, and those behind them."""
    fitting = len(beside)
    while fitting > 1 and sum(least[at] + _GAP for at in beside[:fitting]) - _GAP > room:
        fitting -= 1
    return beside[:fitting], beside[fitting:]


def _with_names(cells: Sequence[tuple[Text, Text]], width: int) -> Iterator[Text]:
    """Lines of headers and what stands below them; no cell is broken that has room in a line."""
    line = Text()
    for head, cell in cells:
        one = Text(" " * _GAP).append_text(head).append(" ").append_text(cell)
        if line and line.cell_len + one.cell_len > width:
            yield line
            line = Text()
        line.append_text(one)
    if line:
        yield line


def _longest_word(at: int, rows: Sequence[Sequence[Text]]) -> int:
    return max((cell_len(word) for row in rows for word in row[at].plain.split()), default=0)


def _pairs(table: TextTable, console: Console) -> Iterator[Text]:
    rows = [[_text(cell) for cell in row] for row in table.rows]
    first = max((name.cell_len for name, _ in rows), default=0) + _GAP
    for name, value in rows:
        for number, line in enumerate(_wrapped(value, console.width - first)):
            shown = Text(name.plain if not number else "", "bold")
            yield shown.append(" " * (first - shown.cell_len)).append_text(line)


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
