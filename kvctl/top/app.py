"""The full screen of `kvctl top`. It needs no mouse, and no colours but those of the terminal."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from kvctl.cli.numbers import clock, now
from kvctl.errors import KvctlError
from kvctl.top.looking import Look
from kvctl.top.tables import TABLES, Table, chosen, fitting
from kvctl.views.drawing import as_text
from kvctl.views.screen import ScreenPart, Styled
from kvctl.views.top import heading
from kvctl.views.transfers.whole import WholeTransfer, whole_transfer_screen
from kvd.shown import escaped

SECONDS = 1.0
"""Between two looks: kvd is asked no more often."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What is shown: how to look at it (after the look before), how to get one transfer, and where it is.

    Both functions may wait and raise `KvctlError`.
    """

    look: Callable[[Look | None], Look]
    whole: Callable[[str], WholeTransfer]
    where: str


def watch(watched: Watched, *, color: bool) -> None:
    """Take the terminal until somebody ends it."""
    if not color:
        os.environ["NO_COLOR"] = "1"
    TopApp(watched).run(mouse=False)


class Timeline(ModalScreen[None]):
    """One transfer, over the tables."""

    BINDINGS: ClassVar = [Binding("escape,q,enter", "dismiss", "Back")]

    def __init__(self, what: ScreenPart) -> None:
        super().__init__()
        self._what = what

    def compose(self) -> ComposeResult:
        """The text, which scrolls, and the keys."""
        with VerticalScroll():
            yield Static(as_text(self._what, self.app.size.width - 2), id="timeline")
        yield Footer()


class TopApp(App[None]):
    """Tables of one kvd, asked anew each second."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 2; }
    #trouble { height: auto; max-height: 4; }
    #tabs { height: 1; }
    #about { height: 1; }
    #filter { height: 1; border: none; padding: 0; display: none; }
    DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar = [
        *(Binding(str(n), f"table({n - 1})", table.name, show=False) for n, table in enumerate(TABLES, 1)),
        Binding("tab", "next(1)", "Table", priority=True),
        Binding("shift+tab", "next(-1)", "", show=False, priority=True),
        Binding("o", "open", "Open"),
        Binding("slash", "filter", "Filter"),
        Binding("s", "sort", "Sort"),
        Binding("r", "reverse", "Reverse"),
        Binding("p", "pause", "Pause"),
        Binding("escape", "clear", "Clear", show=False),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, watched: Watched, every: float = SECONDS) -> None:
        super().__init__()
        self.theme = "ansi-dark"
        self.animation_level = "none"
        self._watched, self._every = watched, every
        self.seen: Look | None = None
        self._asking = self._paused = False
        self._away_since = ""
        self._trouble = ""
        self._at = 0
        self._wanted = ""
        self._sorted: dict[int, tuple[int, bool]] = {}
        """By table: the column that it is sorted by, and whether backwards."""
        self._items: list[Any] = []
        self._filled: object = None
        """What the table was filled with: it is filled anew only with something else."""
        self._head, self._trouble_line = Static(id="head"), Static(id="trouble")
        self._tab_line, self._about = Static(id="tabs"), Static(id="about")
        self._rows = DataTable[Text](cursor_type="row")
        self._filter = Input(placeholder="only rows with ...", id="filter")

    @property
    def table(self) -> Table:
        """The one that is shown."""
        return TABLES[self._at]

    def compose(self) -> ComposeResult:
        """Which kvd, what is wrong, which table, its rows, the chosen one's ids, the keys."""
        yield from (self._head, self._trouble_line, self._tab_line, self._rows, self._about, self._filter)
        yield Footer()

    def on_mount(self) -> None:
        """Look at once, then each second."""
        self._rows.focus()
        self._draw()
        self._tick()
        self.set_interval(self._every, self._tick)

    def _tick(self) -> None:
        if not self._asking and not self._paused:
            self._asking = True
            self.run_worker(self._ask())

    async def _ask(self) -> None:
        try:
            self.seen = await asyncio.to_thread(self._watched.look, self.seen)
        except KvctlError as error:
            self._away_since = self._away_since or clock(now())
            self._trouble = f"not answered since {self._away_since}: {error.message}; asking again"
        else:
            self._away_since = ""
            self._trouble = "; ".join(f"not answered: {what}" for what in self.seen.top.not_answered)
        finally:
            self._asking = False
        self._draw()

    def _draw(self) -> None:
        if not self._rows.is_attached:
            return  # it ends
        width = self.size.width
        head: ScreenPart = heading(self.seen.top) if self.seen else [f"kvd at {self._watched.where}", ""]
        self._head.update(_cut(as_text(head, 10_000), width))
        trouble = self._trouble or "held still; p goes on" * self._paused
        self._trouble_line.display = bool(trouble)
        self._trouble_line.update(
            as_text(Styled(trouble, "bold red" if self._away_since else "yellow"), width)
        )
        self._tab_line.update(_cut(self._tabs(), width))
        self._fill()

    def _tabs(self) -> Text:
        text = Text()
        for number, table in enumerate(TABLES):
            count = len(table.items(self.seen.top)) if self.seen else 0
            here = number == self._at
            text.append(f" {number + 1} {table.name} {count} ", "reverse" if here else "")
        if self._wanted:
            text.append(f"  /{escaped(self._wanted)}", "bold")
        return text

    def _fill(self) -> None:
        """The rows; the cursor stays at its row where that is still there."""
        column, backwards = self._sorted.get(self._at, (None, False))
        before = self._chosen()
        key = self.table.key(before) if before is not None else ""
        top = self.seen.top if self.seen else None
        items = chosen(self.table, top, self._wanted, column, backwards=backwards) if top else []
        if (filling := (self._at, column, backwards, items, self.size)) != self._filled:
            self._filled, self._items = filling, items
            self._refill(column, backwards=backwards)
            keys = [self.table.key(item) for item in items]
            if key in keys:
                self._rows.move_cursor(row=keys.index(key))
        self._tell()

    def _refill(self, column: int | None, *, backwards: bool) -> None:
        """Columns with their widths: those that the widget measures when it is idle it may show too narrow."""
        rows = fitting(self.table, self._items, self.size.width)
        self._rows.clear(columns=True)
        texts = [
            [_cell(cell, right=one.right) for one, cell in zip(self.table.columns, cells, strict=True)]
            for cells in rows
        ]
        for number, one in enumerate(self.table.columns):
            mark = (" v" if backwards else " ^") if number == column else ""
            header = _cell(one.header + mark, right=one.right)
            width = max(header.cell_len, *(row[number].cell_len for row in texts), 0)
            self._rows.add_column(header, width=width)
        for row in texts:
            self._rows.add_row(*row)

    def _chosen(self) -> Any:
        row = self._rows.cursor_row
        return self._items[row] if 0 <= row < len(self._items) else None

    def _tell(self) -> None:
        item = self._chosen()
        about = self.table.about(item) if item is not None else self._nothing()
        self._about.update(_cut(Text(escaped(about), "dim"), self.size.width))

    def _nothing(self) -> str:
        if self.seen is None:
            return ""
        return f"no row has {self._wanted!r}; Esc shows all" if self._wanted else "nothing here now"

    def on_data_table_row_highlighted(self) -> None:
        """The ids of the row that the cursor came to."""
        self._tell()

    async def on_data_table_row_selected(self) -> None:
        """Enter: the table takes that key for itself."""
        await self.action_open()

    def action_table(self, number: int) -> None:
        """Show a table."""
        self._at, self._items, self._filled = number % len(TABLES), [], None
        self._draw()

    def action_next(self, step: int) -> None:
        """Show the next table, or the one before."""
        self.action_table(self._at + step)

    def action_sort(self) -> None:
        """Sort by the next column: the largest first, names from A to Z. After the last one as they come."""
        column = self._sorted.get(self._at, (-1, False))[0] + 1
        if column == len(self.table.columns):
            del self._sorted[self._at]
        else:
            self._sorted[self._at] = column, self.table.columns[column].right
        self._draw()

    def action_reverse(self) -> None:
        """Sort the other way round."""
        column, backwards = self._sorted.get(self._at, (0, True))
        self._sorted[self._at] = column, not backwards
        self._draw()

    def action_pause(self) -> None:
        """Hold still, or go on."""
        self._paused = not self._paused
        self._draw()

    def action_filter(self) -> None:
        """Ask for a text that rows must have."""
        field = self._filter
        field.styles.display = "block"
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while it is typed."""
        self._wanted = event.value
        self._draw()

    def on_input_submitted(self) -> None:
        """Back to the table; the filter stays."""
        self._leave_filter()

    def action_clear(self) -> None:
        """Show all rows again."""
        self._filter.value = ""
        self._leave_filter()

    def _leave_filter(self) -> None:
        self._filter.styles.display = "none"
        self._rows.focus()

    async def action_open(self) -> None:
        """One transfer's timeline; of an engine or a pair, its transfers."""
        item = self._chosen()
        if item is None:
            return
        which = self.table.transfer(item)
        if not which:
            name = (
                item.engine.engine_id if self.table.name == "Engines" else getattr(item, "remote_engine", "")
            )
            self._filter.value = self._wanted = name
            self.action_table([table.name for table in TABLES].index("Transfers"))
            return
        try:
            whole: ScreenPart = whole_transfer_screen(
                await asyncio.to_thread(self._watched.whole, which), wide=False
            )
        except KvctlError as error:
            under_way = self.table.name == "In flight"
            whole = [
                Styled("It is on its way: kvd has its record once it has ended.", "yellow")
                if under_way
                else Styled(error.message, "red"),
                "",
                self.table.about(item),
            ]
        self.push_screen(Timeline(whole))


def _cell(cell: str | Styled, *, right: bool) -> Text:
    text = Text(escaped(cell)) if isinstance(cell, str) else Text(escaped(cell.text), cell.style)
    text.justify = "right" if right else "left"
    return text


def _cut(text: Text, width: int) -> Text:
    """Each line at most so wide: what is longer ends in a mark."""
    lines = text.split("\n")
    for line in lines:
        line.truncate(max(1, width), overflow="ellipsis")
    return Text("\n").join(lines)
