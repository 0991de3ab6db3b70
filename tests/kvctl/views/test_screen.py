"""What a person sees: on a terminal of 80 and of 160 columns, with colour and without."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

import msgspec
import pytest

from kvctl.cli.numbers import rate, size, span
from kvctl.cli.settings import Settings
from kvctl.views.drawing import drawn
from kvctl.views.screen import Indented, ScreenPart, Styled, TextTable, facts, marked
from kvd.wire.query import ListWorkers, WorkerList
from kvd.wire.transfer import ListTransfers, TransferList
from tests.kvctl.conftest import WORKERS, ledger_row

if TYPE_CHECKING:
    from tests.kvctl.conftest import FakeDaemon, Run


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, run: Run) -> Run:
    """The command line on a terminal; the first argument is its width."""

    def on_terminal(width: int, *arguments: object) -> object:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm")
        return run(*arguments)

    return on_terminal  # type: ignore[return-value]


def test_colour_is_for_terminals_and_can_be_forced_or_forbidden(
    run: Run, terminal: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ("--socket", daemon.directory)
    assert "\x1b[" not in run("engines", *where).out
    assert "\x1b[" in run("engines", *where, "--color", "always").out
    assert "\x1b[" in terminal(80, "engines", *where).out
    assert "\x1b[" not in terminal(80, "engines", *where, "--color", "never").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in terminal(80, "engines", *where).out


@pytest.mark.parametrize("command", ["engines", "workers", "status", "slow", "transfers", "top --once"])
def test_tables_fit_80_columns(terminal: Run, daemon: FakeDaemon, command: str) -> None:
    out = terminal(80, *command.split(), "--color", "never", "--socket", daemon.directory).out
    assert max(map(len, out.splitlines())) <= 80


def test_columns_without_room_stand_below_their_row_with_their_headers() -> None:
    shown = TextTable(
        ["WAY", "RATE", "P50", "P99"], [["nixl", "1 GiB/s", "2 ms", "3 ms"], ["direct", "-", "-", "-"]]
    )
    assert on_screen(shown, 16) == [
        "WAY     RATE",
        "nixl    1 GiB/s",
        "  P50 2 ms",
        "  P99 3 ms",
        "direct  -",
        "  P50 -  P99 -",
    ]


@pytest.mark.parametrize("command", ["engines", "workers", "transfers"])
def test_wide_folds_nothing_however_narrow_the_terminal(
    terminal: Run, daemon: FakeDaemon, command: str
) -> None:
    """One item stays one line, for ``less -S``: nothing is cut, folded or put below its row."""
    shown = ("-o", "wide", "--color", "never", "--socket", daemon.directory)
    assert terminal(40, command, *shown).out == terminal(1000, command, *shown).out


@pytest.mark.parametrize("width", [20, 80, 160])
@pytest.mark.parametrize("command", ["engines", "workers", "transfers"])
def test_no_width_loses_a_column(terminal: Run, daemon: FakeDaemon, command: str, width: int) -> None:
    wide = terminal(width, command, "--color", "never", "--socket", daemon.directory).out
    piped = terminal(1000, command, "--color", "never", "--socket", daemon.directory).out
    assert set(piped.split()) <= set(wide.split())


def test_an_id_too_long_for_its_row_stands_below_it_and_whole(
    terminal: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvctl.cli.numbers.now", lambda: datetime(2026, 11, 18, 11, 10, tzinfo=UTC))
    request = "cmpl-8ed2bb737f480ee5a1b2c3d4e5f6-0-93b25bba"
    row = ledger_row(2, request_id=request, stages={"wire": 0.01}, moments={})
    daemon.answers[ListTransfers] = lambda _: TransferList(rows=(row,), total=1)
    out = terminal(80, "transfers", "--color", "never", "--socket", daemon.directory).out
    assert out.splitlines() == [
        "STARTED   FROM       TO            STATE     BYTES     TIME        RATE",
        "  REQUEST",
        "11:06:42  prefill-1  decode-0/tp1  done   64.0 MiB  10.0 ms  6.25 GiB/s",
        f"  {request}",
    ]
    assert (
        len(terminal(120, "transfers", "--color", "never", "--socket", daemon.directory).out.splitlines())
        == 2
    )


def test_a_cell_of_several_words_is_no_id_and_stays_in_its_row() -> None:
    shown = TextTable(["REQUEST", "BYTES", "COPIES"], [["8192 tokens", "4.83 MiB", "16"]])
    assert on_screen(shown, 23) == [
        "REQUEST      BYTES",
        "8192 tokens  4.83 MiB",
        "  COPIES 16",
    ]


def test_prose_goes_on_between_words_and_a_path_is_never_broken() -> None:
    path = "/var/lib/kvd/ledger.sqlite3.damaged-1795446946106258227"
    rows = [["kvd", f"a damaged ledger was set aside and it is {path} in its state directory"]]
    lines = on_screen(TextTable(["ABOUT", "NOTE"], rows), 40)
    assert [line for line in lines if path in line]
    assert lines[1] == "kvd    a damaged ledger was set aside"


@pytest.mark.parametrize("width", [40, 60, 80])
def test_what_is_to_be_typed_is_in_one_line(width: int) -> None:
    command = "kvctl keys trust 'P2K)c?OG0q1Z{z7m<o@XJ7}>N[e9b!H4(6uYv=Tw' 127.0.0.1:17866"
    for part in (
        facts(("others type", command)),
        (Styled("warning  ", "yellow"), f"PEER_DOWN: there, type {command}; then look again"),
        Indented(f"it is let in with `{command}`, as the other one"),
    ):
        assert [line for line in on_screen(part, width) if command in line], part


def on_screen(part: ScreenPart, width: int) -> list[str]:
    """The lines of a part at a terminal of that width."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys.stdout, "isatty", lambda: True)
        patched.setenv("COLUMNS", str(width))
        patched.setenv("TERM", "xterm")
        return drawn(part, Settings(color="never")).splitlines()


def test_watching_on_a_terminal_draws_over_what_was_there_and_marks_what_changed(
    terminal: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, silent = WORKERS[0].state, msgspec.structs.replace(WORKERS[0], state="silent", heartbeat_age=9.0)
    answers = iter((WORKERS, (silent, WORKERS[1]), (silent, WORKERS[1])))
    daemon.answers[ListWorkers] = lambda _: WorkerList(rows=next(answers))
    naps = iter((None, None))

    def nap(_: float) -> None:
        if next(naps, "enough") == "enough":
            raise KeyboardInterrupt

    monkeypatch.setattr("kvctl.views.output.time.sleep", nap)
    out = terminal(80, "workers", "-w", "--socket", daemon.directory).out
    first, second, third = out.split("\x1b[H")[1:]
    assert state != "silent"
    assert first.startswith("\x1b[2J")
    assert all(page.endswith("\x1b[K\n\x1b[J") for page in (first, second, third))
    marked = re.findall(r"\x1b\[[0-9;]*7[0-9;]*m([^\x1b]*)", second)
    assert marked == ["silent"], "the state, and not how long ago it was heard of"
    assert not re.search(r"\x1b\[[0-9;]*7[;m]", first + third)


def test_a_row_that_is_new_is_marked_whole_and_columns_may_come() -> None:
    before = TextTable(("ENGINE", "STATE"), [("a", "ready")])
    now = TextTable(("ENGINE", "STATE", "REASON"), [("a", "ready", "-"), ("b", "ready", "-")])
    (shown,) = cast("list[TextTable]", marked([now], [before]))
    assert [[isinstance(cell, Styled) for cell in row] for row in shown.rows] == [
        [False, False, True],
        [True] * 3,
    ]


def test_facts_that_changed_are_marked_and_those_that_time_changes_are_not() -> None:
    now = cast(
        "TextTable",
        marked(facts(("state", "draining"), ("up", "5s")), facts(("state", "serving"), ("up", "4s"))),
    )
    assert now.rows == [["state", Styled("draining", "reverse")], ["up", "5s"]]


def test_a_list_taller_than_the_terminal_ends_with_how_much_is_missing(
    terminal: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvctl.views.output.time.sleep", interrupt)
    monkeypatch.setenv("LINES", "4")
    lines = terminal(80, "engines", "-w", "--color", "never", "--socket", daemon.directory).out.splitlines()
    assert re.match(r"\.\.\. [0-9] more lines", lines[2])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (24 << 30, "24.0 GiB"), (1 << 62, "4096 PiB")],
)
def test_sizes(value: int, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 us"),
        (0.00085, "850 us"),
        (0.012, "12.0 ms"),
        (3.2, "3.20 s"),
        (250, "4m10s"),
        (7500, "2h05m"),
        (273600, "3d04h"),
    ],
)
def test_spans(value: float, text: str) -> None:
    assert span(value) == text


def test_rates() -> None:
    assert (rate(None), rate(8 << 30)) == ("-", "8.00 GiB/s")
