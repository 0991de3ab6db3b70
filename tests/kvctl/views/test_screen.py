"""What a person sees: on a terminal of 80 and of 160 columns, with colour and without."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from kvctl.cli.numbers import rate, size, span

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


@pytest.mark.parametrize("command", ["engines", "workers", "status"])
def test_tables_fit_80_columns(terminal: Run, daemon: FakeDaemon, command: str) -> None:
    out = terminal(80, command, "--color", "never", "--socket", daemon.directory).out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("width", [20, 80, 160])
@pytest.mark.parametrize("command", ["engines", "workers", "transfers"])
def test_no_width_loses_a_column(terminal: Run, daemon: FakeDaemon, command: str, width: int) -> None:
    wide = terminal(width, command, "--color", "never", "--socket", daemon.directory).out
    piped = terminal(1000, command, "--color", "never", "--socket", daemon.directory).out
    assert wide.splitlines()[0].split() == piped.splitlines()[0].split()
    assert "".join(sorted("".join(wide.split()))) == "".join(sorted("".join(piped.split())))


def test_watching_on_a_terminal_clears_the_screen(
    terminal: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvctl.views.output.time.sleep", interrupt)
    assert terminal(80, "engines", "--watch", "1", "--socket", daemon.directory).out.startswith(
        "\x1b[H\x1b[2J"
    )


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
