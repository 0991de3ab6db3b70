"""What each command asks of kvd, and its own options."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvd.wire.identity import Endpoint
from kvd.wire.query import ListWorkers, WorkerList
from kvd.wire.transfer import ListTransfers
from tests.kvctl.conftest import WORKERS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kvctl.conftest import FakeDaemon, Run


def test_engines_are_filtered_by_state_and_place(run: Run, daemon: FakeDaemon) -> None:
    for option, left in ((("--state", "partial"), "prefill-0"), (("--local",), "decode-0")):
        rows = json.loads(run("engines", *option, "-o", "json", "--socket", daemon.directory).out)["engines"]
        assert [row["engine_id"] for row in rows] == [left]


def test_a_worker_at_another_kvd_is_shown_with_that(run: Run, daemon: FakeDaemon) -> None:
    assert " AT " not in run("workers", "--socket", daemon.directory).out
    afar = msgspec.structs.replace(WORKERS[0], at=Endpoint("10.0.0.8", 7766))
    daemon.answers[ListWorkers] = lambda _: WorkerList(rows=(WORKERS[1], afar))
    out = run("workers", "--socket", daemon.directory).out.splitlines()
    place = out[0].index(" AT ") + 1
    assert [line[place:].split()[0] for line in out[1:]] == ["-", "10.0.0.8:7766"]


def test_workers_are_filtered_by_engine(run: Run, daemon: FakeDaemon) -> None:
    assert run("workers", "--engine", "nobody", "-o", "jsonl", "--socket", daemon.directory).out == ""
    assert run("workers", "-e", "decode-0", "-o", "jsonl", "--socket", daemon.directory).out.count("\n") == 2


def test_the_filters_of_transfers_are_applied_by_kvd(run: Run, daemon: FakeDaemon) -> None:
    filters = ("--limit", "7", "--engine", "decode-0", "--request", "cmpl-3", "--state", "miss")
    run("transfers", *filters, "--socket", daemon.directory)
    assert daemon.asked[-1] == ListTransfers(limit=7, engine_id="decode-0", request_id="cmpl-3", state="miss")


def test_transfers_without_options_asks_for_the_newest_twenty(run: Run, daemon: FakeDaemon) -> None:
    run("transfers", "--socket", daemon.directory)
    assert daemon.asked[-1] == ListTransfers(limit=20)


def test_watching_transfers_as_lines_prints_each_once(
    run: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps = iter((None, None))

    def nap(seconds: float) -> None:
        assert seconds == 0.5
        if next(naps, "enough") == "enough":
            raise KeyboardInterrupt

    monkeypatch.setattr("kvctl.views.output.time.sleep", nap)
    outcome = run("transfers", "--watch", "500ms", "-o", "jsonl", "--socket", daemon.directory)
    assert outcome.code == 130
    assert [json.loads(line)["seq"] for line in outcome.out.splitlines()] == [1, 2, 3]
    assert [m.after for m in daemon.asked if isinstance(m, ListTransfers)] == [0, 3, 3]


def test_watching_a_table_prints_pages_with_their_times_when_piped(
    run: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps = iter((None,))

    def nap(seconds: float) -> None:
        if next(naps, seconds) == seconds:
            raise KeyboardInterrupt

    monkeypatch.setattr("kvctl.views.output.time.sleep", nap)
    monkeypatch.setattr("kvctl.cli.numbers.now", lambda: datetime(2026, 11, 18, 11, 10, tzinfo=UTC))
    lines = run("engines", "-w", "2", "--socket", daemon.directory).out.splitlines()
    once = ["2026-11-18T11:10:00+00:00", "ENGINE", "decode-0", "prefill-1", "prefill-0"]
    assert [line.split(" ")[0] for line in lines] == [*once, "", *once]


@pytest.mark.parametrize("bare", [("-w", "--local"), ("--local", "--watch"), ("--local", "-w")])
def test_watch_without_a_number_asks_every_two_seconds(
    run: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, bare: tuple[str, ...]
) -> None:
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr("kvctl.views.output.time.sleep", nap)
    outcome = run("--socket", daemon.directory, "engines", *bare)
    assert (outcome.code, naps) == (130, [2.0])
    assert "decode-0" in outcome.out
    assert "prefill-1" not in outcome.out


def test_events_end_after_the_count(run: Run, daemon: FakeDaemon) -> None:
    outcome = run("events", "--count", "2", "-o", "jsonl", "--timeout", "5", "--socket", daemon.directory)
    first, second = map(json.loads, outcome.out.splitlines())
    assert outcome.code == 0
    assert (first["kind"], first["event"], first["subject"]) == ("Event", "engine.ready", "decode-0")
    assert (second["seq"], second["detail"]) == (2, {"ranks": 2})


def test_a_gap_between_events_is_told_on_stderr(run: Run, daemon: FakeDaemon) -> None:
    outcome = run("events", "-n", "3", "--timeout", "5", "--socket", daemon.directory)
    assert outcome.err == "kvctl: 2 events were lost between 2 and 5\n"


def test_events_are_filtered_by_the_beginning_of_their_kind(run: Run, daemon: FakeDaemon) -> None:
    outcome = run(
        "events",
        "transfer",
        "lease.",
        "-n",
        "2",
        "--timeout",
        "5",
        "-o",
        "jsonl",
        "--socket",
        daemon.directory,
    )
    assert [json.loads(line)["event"] for line in outcome.out.splitlines()] == [
        "transfer.miss",
        "lease.expired",
    ]


def test_events_that_do_not_come_in_time_are_exit_code_4(run: Run, daemon: FakeDaemon) -> None:
    outcome = run("events", "-n", "9", "--timeout", "1s", "--socket", daemon.directory)
    assert outcome.code == 4
    assert "3 events of the 9 asked for came" in outcome.err


def test_version_needs_no_daemon(run: Run, tmp_path: object) -> None:
    outcome = run("version", "-o", "json", "--runtime-dir", f"{tmp_path}/nowhere")
    assert (outcome.code, json.loads(outcome.out)["daemon"]) == (0, None)


def test_version_can_leave_the_daemon_alone(run: Run, daemon: FakeDaemon) -> None:
    run("version", "--client", "--socket", daemon.directory)
    assert daemon.asked == []


def test_schema_takes_a_kind_in_any_case(run: Run) -> None:
    assert json.loads(run("schema", "topology").out)["title"] == "Topology"


def test_schema_names_near_misses(run: Run) -> None:
    outcome = run("schema", "Topologie")
    assert outcome.code == 2
    assert "'Topologie'; did you mean Topology" in outcome.err


def test_how_requests_were_served_is_asked_for_only_where_it_is_shown(run: Run, daemon: FakeDaemon) -> None:
    for form, questions in (("table", 1), ("wide", 2), ("json", 2)):
        daemon.asked.clear()
        run("engines", "-o", form, "--socket", daemon.directory)
        assert len(daemon.asked) == questions


@pytest.mark.parametrize("words", [("schema", "Topology"), ("export-geometry", "qwen3-32b:tp=2")])
def test_a_document_is_one_line_of_jsonl(run: Run, words: tuple[str, ...]) -> None:
    whole, line = run(*words, "-o", "json").out, run(*words, "-o", "jsonl").out
    assert line.count("\n") == 1
    assert json.loads(line) == json.loads(whole)


def test_a_transfer_needs_an_id(run: Run) -> None:
    outcome = run("transfer", "")
    assert (outcome.code, outcome.err) == (
        2,
        "kvctl: ID is empty; kvctl transfers -o wide lists ids [KVD-CTL-USAGE]\n",
    )


def test_the_demo_names_a_directory_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    outcome = run("demo", "--simulate", "--dir", str(file / "inside"))
    assert outcome.code == 2
    assert f"no files can be made in {file}/inside: Not a directory" in outcome.err


def test_kinds_of_events_that_there_are_not_are_refused(run: Run, daemon: FakeDaemon) -> None:
    for kind, told in (("xyz", "choose from engine, worker, "), ("engine.redy", "did you mean engine.ready")):
        outcome = run("events", kind, "--timeout", "5", "--socket", daemon.directory)
        assert (outcome.code, told in outcome.err) == (2, True), outcome.err
