"""`kvctl doctor` as a whole: its exit code, and a real kvd with a real worker."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from kvctl.doctor.reasons import REASONS
from kvd.wire.outcomes import OutcomeCount, ReportOutcomes
from kvd.wire.reply import Refused
from kvd.wire.transfer import ListTransfers
from tests.support.daemons import ROOT, daemons, facts, scheduler, session, worker

if TYPE_CHECKING:
    from tests.kvctl.conftest import FakeDaemon, Run


def test_a_real_kvd_with_an_engine_is_well(run: Run) -> None:
    with daemons() as (kvd,), session(kvd, worker(facts("d"))) as made:
        made.wait(lambda state: bool(state.engine_generation), 20)
        outcome = run("doctor", "--quick", "-o", "json", "--runtime-dir", kvd.directory)
    checks = {check["code"]: check for check in json.loads(outcome.out)["checks"]}
    assert outcome.code == 0
    assert checks["ENGINES"]["found"] == "1 ready: d"
    assert {checks[code]["state"] for code in ("KVD", "KVD_PACE", "PEERS", "TRANSFERS")} == {"ok"}
    assert checks["DISAGGREGATED"]["state"] == "skipped"


def test_without_kvd_it_fails_and_looks_at_the_host_all_the_same(run: Run, tmp_path: Path) -> None:
    outcome = run("doctor", "--quick", "--runtime-dir", tmp_path / "none")
    assert outcome.code == 1
    assert re.search(r"^kvd +failed +no kvd here: ", outcome.out, re.MULTILINE)
    assert re.search(r"^failed  KVD: see `systemctl status kvd`", outcome.out, re.MULTILINE)
    assert re.search(r"^host +", outcome.out, re.MULTILINE)
    assert re.search(r"^\d+ checks: 1 failed(, \d+ warn)?\n\Z", outcome.out, re.MULTILINE)


def test_warnings_alone_are_no_failure(run: Run, daemon: FakeDaemon) -> None:
    outcome = run("doctor", "--quick", "-o", "json", "--runtime-dir", daemon.directory)
    body = json.loads(outcome.out)
    assert (outcome.code, body["failed"]) == (0, 0)
    assert body["warnings"] == sum(check["state"] == "warning" for check in body["checks"]) > 0


def test_a_question_that_kvd_refuses_is_a_check_and_all_else_is_looked_at(
    run: Run, daemon: FakeDaemon
) -> None:
    away = Refused(code="KVD-LEDGER", message="the ledger is away: no space", hint="see the disk")
    daemon.answers[ListTransfers] = lambda _: away
    outcome = run("doctor", "--quick", "-o", "json", "--runtime-dir", daemon.directory)
    checks = {check["code"]: check for check in json.loads(outcome.out)["checks"]}
    assert (outcome.code, checks["NOT_ANSWERED"]["found"]) == (0, "the ledger is away: no space")
    assert {"KVD", "PEERS", "PTRACE"} < set(checks)


def test_requests_that_are_quietly_not_handed_over_fail_with_the_reason(run: Run) -> None:
    """What schedulers counted, as `kvd.vllm.scheduler.served` does; a router in front of both drops the params."""
    with (
        daemons() as (kvd,),
        session(kvd, worker(facts("p", role="prefill"))),
        session(kvd, worker(facts("d", role="decode"))),
        session(kvd, scheduler(facts("d", role="decode"))) as decoder,
    ):
        seen = OutcomeCount("plain", "", 40, 4000)
        decoder.call(ReportOutcomes(engine_id="d", totals=(seen,)), 5).result(6)
        outcome = run("doctor", "--quick", "-o", "json", "--runtime-dir", kvd.directory)
        screen = run("doctor", "--quick", "-o", "wide", "--runtime-dir", kvd.directory)
    checks = {check["code"]: check for check in json.loads(outcome.out)["checks"]}
    found = checks["NOT_DISAGGREGATED"]
    assert (outcome.code, found["state"], found["reason"]) == (1, "failed", "ROUTER_ASKS_NO_PREFILLER")
    assert found["found"].startswith("d: 40 of 40 prompts of the last 60 s (100% of their tokens)")
    assert "DISAGGREGATED" not in checks
    assert "NOT_DISAGGREGATED (ROUTER_ASKS_NO_PREFILLER): " in screen.out


def test_every_code_is_explained() -> None:
    written = (ROOT / "docs" / "cli.md").read_text().partition("\n## kvctl doctor\n")[2].partition("\n## ")[0]
    source = "".join(path.read_text() for path in (ROOT / "kvctl" / "doctor").glob("*_checks.py"))
    codes = set(re.findall(r'"(?:ok|warning|failed|skipped)",\s+"([A-Z_]+)"', source)) | {
        "ENGINE_PARTIAL",
        "ENGINE_GONE",
        "ENGINE_UNREACHABLE",
        "NOT_DISAGGREGATED",
    }
    assert len(codes) >= 20
    assert {code for code in codes if f"`{code}`" not in written} == set()


def test_every_reason_is_explained() -> None:
    written = (ROOT / "docs" / "disaggregated.md").read_text()
    assert {reason.name for reason in REASONS if f"`{reason.name}`" not in written} == set()
