"""What a person sees on stderr while the demo runs: one line a step, live on a terminal, as plain lines in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvctl.cli.numbers import span
from kvctl.cli.settings import ColorMode
from kvctl.processes.interruption import interrupted
from kvd.shown import escaped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table


@dataclass(slots=True)
class Step:
    """One line: what goes on, since when (monotonic seconds), and how it ended once it did."""

    text: str
    began: float
    took: float | None = None
    note: str = ""
    good: bool = True


@dataclass(slots=True)
class Board:
    """The steps so far. Its methods may be called from any thread."""

    console: Console
    live: Live | None = None
    steps: dict[str, Step] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, key: str, text: str) -> None:
        """A step begins."""
        with self.lock:
            self.steps[key] = Step(text, time.monotonic())
        self._show(f"{text} ...")

    def end(self, key: str, note: str = "", *, good: bool = True) -> None:
        """The step of that key ended; ``note`` says how where there is more to say than that."""
        with self.lock:
            step = self.steps[key]
            step.took, step.note, step.good = time.monotonic() - step.began, note, good
        outcome = note or ("done" if good else "failed")
        self._show(f"{step.text}: {outcome} ({span(step.took)})")

    def _show(self, line: str) -> None:
        if self.live is None:
            self.console.print(escaped(f"demo: {line}"), soft_wrap=True)
        else:
            self.live.refresh()

    def __rich__(self) -> Table:
        """All steps as they are now."""
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=1)
        grid.add_column(overflow="fold")
        grid.add_column(justify="right", no_wrap=True)
        with self.lock:
            for step in self.steps.values():
                if step.took is None:
                    elapsed = span(max(0.1, time.monotonic() - step.began))
                    grid.add_row(
                        Spinner("line", style="cyan"), Text(escaped(step.text)), Text(elapsed, "cyan")
                    )
                    continue
                mark = Text("+", "green") if step.good else Text("!", "bold red")
                text = f"{step.text}: {step.note}" if step.note else step.text
                grid.add_row(
                    mark, Text(escaped(text), "" if step.good else "red"), Text(span(step.took), "dim")
                )
        if interrupted():
            grid.add_row(
                Spinner("line", style="yellow"), Text("interrupted: ending all that was started", "yellow")
            )
        return grid


@contextmanager
def board(color: ColorMode) -> Iterator[Board]:
    """A board on stderr; its last state stays on the screen."""
    from rich.console import Console
    from rich.live import Live

    terminal = sys.stderr.isatty()
    coloured = color == "always" or (color == "auto" and terminal)
    console = Console(
        stderr=True,
        no_color=not coloured,
        color_system="standard" if coloured else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    made = Board(console)
    if not terminal:
        yield made
        return
    with Live(
        made, console=console, refresh_per_second=8, redirect_stdout=False, redirect_stderr=False
    ) as live:
        made.live = live
        try:
            yield made
        finally:
            made.live = None
            live.refresh()
    console.print()  # a gap between the talk and the data
