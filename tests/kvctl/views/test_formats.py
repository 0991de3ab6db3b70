"""Every command in every form of output, against a daemon that speaks the real wire."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml

from kvctl.views.registry import json_schema, views

if TYPE_CHECKING:
    from tests.kvctl.conftest import FakeDaemon, Run

PRINTED = {
    "engines": ("Engines", "Engine", 3),
    "workers": ("Workers", "Worker", 2),
    "describe-topology": ("Topology", "Pair", 1),
    "transfers": ("Transfers", "Transfer", 3),
    "transfers --by state": ("TransferGroups", "TransferGroup", 2),
    "transfer t-2": ("WholeTransfer", "WholeTransfer", 1),
    "slow": ("Slow", "SlowPair", 1),
    "trace show": ("Traces", "KeptTrace", 0),
    "force-miss --order 5f3a9c01d2e4": ("ForcedMiss", "ForcedRequest", 1),
    "force-miss --clear": ("ClearedOrders", "ClearedOrders", 1),
    "status": ("Status", "Status", 1),
    "version": ("Version", "Version", 1),
    "schema": ("Kinds", "KindName", len(views())),
}
"""For each command the kind of its document, the kind of its lines as JSON lines, how many there are."""
every_command = pytest.mark.parametrize("command", PRINTED)
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


def check(document: dict[str, Any]) -> None:
    """Valid by the schema of its kind, which must know every field that is there."""

    def closed(node: Any) -> Any:
        if isinstance(node, dict):
            extra = {"additionalProperties": False} if "properties" in node else {}
            return {key: closed(value) for key, value in node.items()} | extra
        return [closed(item) for item in node] if isinstance(node, list) else node

    schema = json_schema(document["kind"])
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(closed(schema)).validate(document)


@every_command
def test_json_is_one_document_that_its_schema_accepts(run: Run, daemon: FakeDaemon, command: str) -> None:
    outcome = run(*command.split(), "-o", "json", "--runtime-dir", daemon.directory)
    document = json.loads(outcome.out)
    assert (outcome.code, outcome.err) == (0, "")
    assert (document["kind"], document["schema_version"]) == (PRINTED[command][0], 1)
    check(document)


@every_command
def test_jsonl_is_one_document_a_line(run: Run, daemon: FakeDaemon, command: str) -> None:
    outcome = run(*command.split(), "-o", "jsonl", "--runtime-dir", daemon.directory)
    documents = [json.loads(line) for line in outcome.out.splitlines()]
    _, kind, lines = PRINTED[command]
    assert [d["kind"] for d in documents] == [kind] * lines
    for document in documents:
        check(document)


@every_command
def test_yaml_says_the_same_as_json(run: Run, daemon: FakeDaemon, command: str) -> None:
    as_yaml = run(*command.split(), "-o", "yaml", "--runtime-dir", daemon.directory).out
    as_json = run(*command.split(), "-o", "json", "--runtime-dir", daemon.directory).out
    assert yaml.safe_load(as_yaml) == json.loads(as_json)


@every_command
@pytest.mark.parametrize("form", ["table", "wide"])
def test_tables_are_plain_text_without_colour_when_piped(
    run: Run, daemon: FakeDaemon, command: str, form: str
) -> None:
    outcome = run(*command.split(), "-o", form, "--runtime-dir", daemon.directory)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.endswith("\n")
    assert "\x1b" not in outcome.out
    assert all(line == line.rstrip() for line in outcome.out.splitlines())


def test_wide_has_more_columns_than_table(run: Run, daemon: FakeDaemon) -> None:
    for command in ("engines", "workers", "transfers"):
        narrow = run(command, "--runtime-dir", daemon.directory).out.splitlines()[0].split()
        wide = run(command, "-o", "wide", "--runtime-dir", daemon.directory).out.splitlines()[0].split()
        assert set(narrow) < set(wide)


def test_times_are_rfc_3339_and_numbers_are_in_base_units(run: Run, daemon: FakeDaemon) -> None:
    rows = json.loads(run("transfers", "-o", "json", "--runtime-dir", daemon.directory).out)["transfers"]
    assert all(TIME.fullmatch(row["started"]) for row in rows)
    done = rows[1]
    assert (done["bytes"], done["seconds"], done["stages"]["wire"]) == (
        64 << 20,
        pytest.approx(0.0096),
        0.008,
    )
    assert done["bytes_per_second"] == pytest.approx((64 << 20) / 0.008)
    assert rows[0]["bytes_per_second"] is None


def test_what_engines_say(run: Run, daemon: FakeDaemon) -> None:
    engines = json.loads(run("engines", "-o", "json", "--runtime-dir", daemon.directory).out)["engines"]
    local, _, peer = engines
    assert (local["place"], local["endpoint"], local["ranks"]) == ("local", None, ["tp0", "tp1"])
    assert (peer["place"], peer["endpoint"], peer["ranks"]) == ("peer", "10.0.0.7:7766", ["tp0.pp1", "tp1"])
    table = run("engines", "--runtime-dir", daemon.directory).out
    assert table.splitlines()[0].split() == [
        "ENGINE",
        "MODEL",
        "ROLE",
        "STATE",
        "RANKS",
        "SHAPE",
        "SINCE",
        "REASON",
    ]
    assert "6 of 8 workers are missing" in table


def test_global_options_may_stand_before_or_after_the_command(run: Run, daemon: FakeDaemon) -> None:
    before = run("-o", "json", "--runtime-dir", daemon.directory, "engines").out
    after = run("engines", "-o", "json", "--runtime-dir", daemon.directory).out
    assert before == after
    assert run("-o", "json", "--runtime-dir", daemon.directory, "engines", "-o", "jsonl").out.count("\n") == 3


def test_socket_may_be_a_path_an_address_or_a_directory(run: Run, daemon: FakeDaemon) -> None:
    for where in (daemon.directory / "kvd.sock", f"ipc://{daemon.directory}/kvd.sock", daemon.directory):
        assert run("status", "--socket", where).code == 0
