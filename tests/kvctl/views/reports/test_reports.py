"""What stands in the reports: who made them of what, the worst first, and nothing that would have to be fetched."""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvctl.cli.numbers import span
from kvctl.views.measuring.replay import ways
from kvctl.views.reports.benchmark import benchmark_page
from kvctl.views.reports.replay import replay_page
from kvctl.views.reports.trace import reported, trace_page
from kvctl.views.reports.transfers import ReportedTransfer, transfer_sections, worst_first
from kvctl.views.trace import trace_document
from kvd.trace.model import RecordedTrace
from tests.kvctl.golden_documents import BENCHMARK, REPLAY
from tests.support.daemons import ROOT
from tests.support.incident import incident

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kvctl.conftest import Run


def one(request: str, seconds: float, began: float = 0.0, missed: str = "") -> ReportedTransfer:
    return ReportedTransfer(
        request=request, source="p", reader="d", rank="tp0", how="nixl pull", began=began,
        stages={"wire": seconds}, bytes=1, copies=1, tokens=1, missed=missed,
    )  # fmt: skip


def page_of(trace: RecordedTrace) -> str:
    return trace_page(trace_document(trace, trace.transfers, "incident.trace.zst"), trace)


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    trace = incident()
    return {
        "trace": page_of(trace),
        "replay": replay_page(REPLAY, trace, {7: {"nixl": 0.004, "direct": 0.001}}),
        "benchmark": benchmark_page(BENCHMARK),
    }


# --- who, when, with what ---


@pytest.mark.parametrize("kind", ["trace", "replay", "benchmark"])
def test_a_page_says_who_made_it_when_where_with_what_and_how(kind: str, pages: dict[str, str]) -> None:
    page = pages[kind]
    assert re.search(r"<dt>Made</dt><dd>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", page)
    assert f" on {socket.gethostname()} (" in page
    assert re.search(r"<dt>With</dt><dd>kvctl \S+, Python 3\.\d+", page)
    assert "<dt>Command</dt><dd>kvctl" in page


def test_the_command_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/kvctl", "benchmark", "--model", "a b"])
    assert "<dd>kvctl benchmark --model &#x27;a b&#x27;</dd>" in benchmark_page(BENCHMARK)


def test_a_user_without_a_name_is_told_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 4_000_000)
    assert "by uid 4000000 on " in benchmark_page(BENCHMARK)


def test_a_record_says_when_it_was_made_by_what_and_of_which_engines(pages: dict[str, str]) -> None:
    for page in (pages["trace"], pages["replay"]):
        assert "<dt>Recorded</dt><dd>2026-11-18 10:00:00 UTC, 59m57s from the first to the last</dd>" in page
        assert "<dt>Written by</dt><dd>kvd 0.1.0</dd>" in page
        assert "<dd>1200 transfers of 1200 requests, 8 of them misses</dd>" in page
        assert re.search(r">prefill-0</td>.*>Qwen/Qwen3-32B</td>.*>0\.32\.0</td>", page)


# --- the axis and the worst ---


def test_the_worst_are_the_longest_misses_then_the_longest_others() -> None:
    done = [one(f"d{n}", n / 10) for n in range(20)]
    missed = [one(f"m{n}", n / 100, missed="TOO_LATE") for n in range(8)]
    names = [of.request for of in worst_first(done + missed)]
    assert names == ["m7", "m6", "m5", "m4", "m3", "d19", "d18", "d17", "d16", "d15"]
    assert [of.request for of in worst_first(missed)] == [f"m{n}" for n in range(7, -1, -1)]


def test_a_transfer_stands_where_it_began_and_as_high_as_it_took_long() -> None:
    axis, worst = transfer_sections([one("first", 0.001), one("middle", 0.01, 50.0), one("last", 0.1, 100.0)])
    places = dict(re.findall(r'<a href="#(worst-\d)" style="(\S+)"', axis.html))
    assert places == {
        "worst-1": "left:100.00%;bottom:100.00%",
        "worst-2": "left:50.00%;bottom:50.00%",
        "worst-3": "left:0.00%;bottom:0.00%",
    }
    assert re.findall(r'<li id="(worst-\d)"><b>(.*?)</b>', worst.html) == [
        ("worst-1", "1. 100 ms"),
        ("worst-2", "2. 10.0 ms"),
        ("worst-3", "3. 1.00 ms"),
    ]


def test_a_miss_is_a_square_and_says_its_code(pages: dict[str, str]) -> None:
    assert pages["trace"].count('<i class="missed"') == 8
    assert pages["trace"].index("missed: TOO_LATE") < pages["trace"].index("<b>6. ")


def test_transfers_in_one_place_are_one_dot() -> None:
    axis, _ = transfer_sections(
        [one(f"r{n}", 0.01, began=n * 1e-6) for n in range(5000)] + [one("z", 1.0, 9.0)]
    )
    assert axis.html.count("<i ") == 2
    assert "and 4999 more" in axis.html


@pytest.mark.parametrize("transfers", [[one("only", 0.0)], [one("a", 0.5), one("b", 0.5)]])
def test_one_moment_and_one_length_have_an_axis_too(transfers: list[ReportedTransfer]) -> None:
    axis, _ = transfer_sections(transfers)
    assert "left:50.00%" in axis.html


def test_a_trace_of_no_transfers_has_no_axis() -> None:
    assert list(transfer_sections([])) == []


@pytest.mark.parametrize("began", [1e12, -1e12])
def test_a_transfer_that_began_beyond_calendars_is_shown(began: float) -> None:
    """A worker's clock may say so."""
    for others in ((), (one("now", 0.001, 1.8e9),)):
        assert list(transfer_sections([one("odd", 0.01, began), *others]))


def test_a_replayed_transfer_says_how_long_it_took_again() -> None:
    trace = incident()
    [moved] = reported(trace, trace.transfers[:1], {0: {"nixl": 0.004, "direct": 0.001}})
    _, worst = transfer_sections([moved])
    assert "again: nixl 4.00 ms, direct 1.00 ms" in worst.html


def test_beside_the_middles_of_stages_stands_that_of_whole_transfers_not_their_sum(
    pages: dict[str, str],
) -> None:
    figures = ways(REPLAY)
    assert figures
    for way in figures:
        assert f"a transfer {span(way.seconds.p50)}<" in pages["replay"]
    assert re.search(r"<span>[^<]*\bp50\b", pages["replay"]) is None


def test_a_benchmark_begins_with_what_is_furthest_from_what_the_machine_can_do() -> None:
    row, replace = BENCHMARK.measurements[0], msgspec.structs.replace
    rows = [
        replace(row, backend=f"at {ratio}", ceilings=tuple(replace(one, ratio=ratio) for one in row.ceilings))
        for ratio in (0.9, 0.3, 0.6)
    ]
    page = benchmark_page(replace(BENCHMARK, measurements=tuple(rows)))
    assert re.findall(r'<div class="bar"><span>(at \S+)', page) == ["at 0.3", "at 0.6", "at 0.9"]


# --- what a page is made of ---


@pytest.mark.parametrize("kind", ["trace", "replay", "benchmark"])
def test_a_page_needs_nothing_but_itself(kind: str, pages: dict[str, str]) -> None:
    assert re.findall(r"<script|src=|https?://|@import|url\(", pages[kind]) == []
    assert set(re.findall(r'href="(.)', pages[kind])) <= {"#"}


def test_the_report_among_the_examples_is_of_the_form_that_reports_have_now(pages: dict[str, str]) -> None:
    """Else: docs/replay.md has the command that makes it anew."""
    example = (ROOT / "examples" / "traces" / "gdn-tp1-to-tp2.html").read_text()

    def form(page: str) -> tuple[list[str], list[str], str]:
        titles, facts = re.findall("<h2>([^<\\d]+)", page), re.findall("<dt>([^<]+)</dt>", page)
        return titles, facts, page[page.index("<style>") : page.index("</style>")]

    assert form(example) == form(pages["replay"])


def test_ids_that_would_be_html_or_move_a_cursor_are_text() -> None:
    page = page_of(incident("<img src=x>\x1b[2J\u202e"))
    assert "<img" not in page
    assert "&lt;img src=x&gt;\\x1b[2J\\u202e" in page


# --- the command ---


def test_a_trace_becomes_a_page(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "page.html"
    outcome = run("trace", "show", "examples/traces/gdn-tp1-to-tp2.jsonl.gz", "--report", report)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == run("trace", "show", "examples/traces/gdn-tp1-to-tp2.jsonl.gz").out
    page = report.read_text()
    assert "16 transfers of 8 requests, 0 of them misses" in page
    assert "<b>1. 2.29 s</b>" in page


def test_a_page_of_no_trace_and_one_that_cannot_be_written_are_2(run: Run, tmp_path: Path) -> None:
    nothing = run("trace", "show", "--report", tmp_path / "page.html")
    assert (nothing.code, nothing.out) == (2, "")
    assert "--report is of one trace, and none is named" in nothing.err
    nowhere = run(
        "trace", "show", "examples/traces/gdn-tp1-to-tp2.jsonl.gz", "--report", tmp_path / "no" / "p.html"
    )
    assert (nowhere.code, nowhere.out) == (2, "")
    assert "is no folder that can be written to" in nowhere.err
