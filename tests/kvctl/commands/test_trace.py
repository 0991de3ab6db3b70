"""Traces on the command line: exported from kvd, imported under a name, looked at, refused in one line."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import jsonschema
import pytest

from kvctl.views.registry import json_schema
from kvd.trace.read import read_trace
from kvd.wire.reply import Refused
from kvd.wire.transfer import GetKeptEngine, ListTransfers, TransferList
from tests.kvctl.conftest import LEDGER
from tests.support.traces import write

if TYPE_CHECKING:
    from tests.kvctl.conftest import FakeDaemon, Run


def exported(run: Run, daemon: FakeDaemon, path: Path, *options: str) -> Path:
    outcome = run("trace", "export", path, *options, "--socket", daemon.directory)
    assert (outcome.code, outcome.out) == (0, ""), outcome.err
    assert outcome.err == "kvctl: 3 transfers between 2 engines\n"
    return path


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_what_the_ledger_has_stands_in_the_trace(
    run: Run, daemon: FakeDaemon, tmp_path: Path, name: str
) -> None:
    trace = read_trace(exported(run, daemon, tmp_path / name))
    assert [t.request for t in trace.transfers] == ["cmpl-1", "cmpl-2", "cmpl-3"]
    assert [t.at for t in trace.transfers] == [0.0, 1.0, 2.0]
    assert [t.state for t in trace.transfers] == ["done", "done", "miss"]
    first = trace.transfers[0]
    assert trace.engines[first.remote].line.engine_id == "prefill-1"
    assert len(trace.geometries[first.remote].workers) == 4
    assert (first.local_blocks[0].runs, first.remote_blocks[0].runs) == (((1, 2), (0, 1)), ((1, 3),))
    assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b") is name.endswith(".gz")


def test_nothing_of_the_originals_places_is_in_it(run: Run, daemon: FakeDaemon, tmp_path: Path) -> None:
    text = exported(run, daemon, tmp_path / "t").read_text()
    for place in ("node7", "10.0.0.8", "7766", str(0x7F0000000000), "went away", "4242"):
        assert place not in text


def test_requests_are_hashed_on_demand_each_export_anew(run: Run, daemon: FakeDaemon, tmp_path: Path) -> None:
    one = exported(run, daemon, tmp_path / "a", "--hash-requests")
    two = exported(run, daemon, tmp_path / "b", "--hash-requests")
    assert "cmpl" not in one.read_text() + two.read_text()
    names = [[t.request for t in read_trace(path).transfers] for path in (one, two)]
    assert len(set(names[0] + names[1])) == 6
    assert read_trace(one).header.hashed


def test_an_engine_that_the_ledger_does_not_know_is_told(
    run: Run, daemon: FakeDaemon, tmp_path: Path
) -> None:
    del daemon.answers[GetKeptEngine]
    outcome = run("trace", "export", tmp_path / "t", "--socket", daemon.directory)
    assert outcome.code == 5, "only KVD-NO-ENGINE means that nothing is kept"

    daemon.answers[GetKeptEngine] = lambda _: Refused(code="KVD-NO-ENGINE", message="not kept")
    outcome = run("trace", "export", tmp_path / "t", "--socket", daemon.directory)
    assert "no geometry is known of decode-0, prefill-1" in outcome.err
    assert read_trace(tmp_path / "t").geometries == {}


def test_an_export_of_nothing_is_1_and_writes_no_file(run: Run, daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.answers[ListTransfers] = lambda _: TransferList(rows=(), total=0)
    outcome = run("trace", "export", tmp_path / "t", "--socket", daemon.directory)
    assert outcome.code == 1
    assert not (tmp_path / "t").exists()


def test_export_without_a_file_writes_to_stdout(process: Run, daemon: FakeDaemon) -> None:
    outcome = process("trace", "export", "--socket", daemon.directory)
    assert outcome.code == 0
    assert json.loads(outcome.out.splitlines()[-1]) == {"line": "end", "transfers": 3}


def test_an_imported_trace_is_used_by_its_name(run: Run, daemon: FakeDaemon, tmp_path: Path) -> None:
    path = exported(run, daemon, tmp_path / "t.jsonl")
    shown = json.loads(run("trace", "import", path, "--name", "friday", "-o", "json").out)
    assert (shown["name"], shown["transfers"], shown["requests"]) == ("friday", 3, 3)
    path.unlink()
    assert json.loads(run("trace", "show", "friday", "-o", "json").out) == shown
    assert [t["name"] for t in json.loads(run("trace", "show", "-o", "json").out)["traces"]] == ["friday"]
    rows = json.loads(run("transfers", "--from", "friday", "--state", "done", "-o", "json").out)
    assert [row["request_id"] for row in rows["transfers"]] == ["cmpl-2", "cmpl-1"]
    assert rows["transfers"][0]["groups"][0]["blocks"] == 3
    assert run("slow", "--from", "friday").code == 0
    whole = json.loads(run("transfer", "cmpl-2", "--from", "friday", "-o", "json").out)
    assert whole["parts"][0]["stages"] == LEDGER[1].record.stages
    assert run("transfer", "cmpl-9", "--from", "friday").code == 2


def test_the_filters_of_a_trace_are_those_of_the_ledger(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", 10)

    def requests(*options: str) -> list[str]:
        body = json.loads(run("transfers", "--from", path, "-o", "json", *options).out)
        return [row["request_id"] for row in body["transfers"]]

    assert requests("--last", "2") == ["r9", "r8"]
    assert requests("--request", "r3") == ["r3"]
    assert requests("--since", "150ms") == ["r9", "r8"]
    assert requests("--engine", "d", "--peer", "p", "--last", "1") == ["r9"]
    assert requests("--peer", "d") == requests("--backend", "direct") == requests("--slower-than", "1s") == []


def test_a_name_that_is_taken_is_5_unless_it_is_to_be_replaced(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl")
    assert run("trace", "import", path).code == 0
    again = run("trace", "import", path)
    assert again.code == 5
    assert "'t' is there already" in again.err
    assert run("trace", "import", path, "--replace").code == 0


def test_a_spoiled_trace_is_not_imported_and_is_one_line(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl")
    path.write_text(path.read_text().rsplit('{"line":"end"', 1)[0])
    for arguments in (("import", path), ("show", path)):
        outcome = run("trace", *arguments)
        assert (outcome.code, outcome.out) == (1, "")
        assert outcome.err.startswith(f"kvctl: {path} ends after line 8")
        assert outcome.err.count("\n") == 1
    error = json.loads(run("trace", "show", path, "-o", "json").err)
    assert error["code"] == "KVD-TRACE-CUT"
    assert json.loads(run("trace", "show", "-o", "json").out)["traces"] == []


def test_a_trace_from_stdin(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = gzip.compress(write(tmp_path / "t").read_bytes())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
    assert run("trace", "show", "-").code == 0


@pytest.mark.parametrize("name", ["../x", "", ".hidden", "a/b"])
def test_a_name_that_would_leave_the_folder_is_refused(run: Run, tmp_path: Path, name: str) -> None:
    path = write(tmp_path / ".jsonl")
    assert run("trace", "import", path, "--name", name).code == 2


def test_an_unknown_trace_names_near_misses(run: Run, tmp_path: Path) -> None:
    run("trace", "import", write(tmp_path / "friday.jsonl"))
    outcome = run("transfers", "--from", "fridai")
    assert outcome.code == 2
    assert "did you mean friday?" in outcome.err


def test_the_document_of_a_trace_is_valid(run: Run, tmp_path: Path) -> None:
    for form in ("json", "yaml", "table", "wide"):
        assert run("trace", "show", write(tmp_path / "t"), "-o", form).code == 0
    body = json.loads(run("trace", "show", tmp_path / "t", "-o", "json").out)
    jsonschema.Draft202012Validator(json_schema("Trace")).validate(body)
    [pair] = body["pairs"]
    assert (pair["replayable"], pair["blocks_per_run"]) == (3, 2.0)


def test_a_group_without_a_command_prints_its_help(run: Run) -> None:
    outcome = run("trace")
    assert outcome.code == 0
    assert "export  Write transfers" in outcome.out
    assert "did you mean export?; see kvctl trace --help" in run("trace", "exprt").err


def test_what_cannot_be_replayed_is_not_said_to_be(run: Run, daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.answers[GetKeptEngine] = lambda _: Refused(code="KVD-NO-ENGINE", message="not kept")
    outcome = run("trace", "export", tmp_path / "t", "--socket", daemon.directory)
    assert outcome.err.endswith("their transfers cannot be replayed\n")
    [pair] = json.loads(run("trace", "show", tmp_path / "t", "-o", "json").out)["pairs"]
    assert (pair["transfers"], pair["replayable"]) == (3, 0)
    rows = [line.split() for line in run("trace", "show", tmp_path / "t").out.splitlines()]
    assert next(row[2] for row in rows if row[:1] == ["prefill-1"]) == "unknown"
    assert "can be replayed" in run("replay", tmp_path / "t").err


def test_what_can_be_replayed_are_the_transfers_that_moved(
    run: Run, daemon: FakeDaemon, tmp_path: Path
) -> None:
    path = exported(run, daemon, tmp_path / "t")
    [pair] = json.loads(run("trace", "show", path, "-o", "json").out)["pairs"]
    assert (pair["transfers"], pair["misses"], pair["replayable"]) == (3, 1, 2)
