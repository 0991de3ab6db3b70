"""configs/monitoring: rules, alerts and dashboard speak of metrics that there are, and each alert is explained."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.support.daemons import ROOT
from tests.support.promtool import promtool

CONFIGS = ROOT / "configs" / "monitoring"
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
METRIC = re.compile(r"^\| (`kvd_[a-z_<>]+`(?:, `kvd_[a-z_<>]+`)*) \| (?:counter|gauge) \|", re.MULTILINE)
NAME = re.compile(r"[a-zA-Z_]+:kvd_[a-zA-Z0-9_:]+|(?<![:\w])kvd_[a-z0-9_]+")
SERIES: dict[str, tuple[list[tuple[str, str]], dict[str, str]]] = {
    "KvdDown": ([('up{job="kvd",instance="a"}', "0x80")], {"job": "kvd"}),
    "KvdLedgerAway": ([('kvd_ledger_open{instance="a"}', "0x80")], {}),
    "KvdBusy": ([('kvd_loop_recent_turn_seconds{instance="a"}', "0.2x80")], {}),
    "KvdInternalErrors": ([('kvd_errors_internal_total{instance="a"}', "_x20 1x60")], {}),
    "KvdPeerDown": ([('kvd_peer_up{instance="a",peer="b:1"}', "0x80")], {"peer": "b:1"}),
    "KvdMembershipAway": ([('kvd_membership_away{instance="a"}', "1x80")], {}),
    "KvdEnginePartial": ([('kvd_engines_partial{instance="a"}', "1x80")], {}),
    "KvdWorkerSilent": (
        [('kvd_workers_silent{instance="a"}', "1x80"), ('kvd_schedulers_silent{instance="a"}', "0x80")],
        {},
    ),
    "KvdMisses": (
        [
            ('kvd_misses_total{instance="a",code="TOO_LATE"}', "0+1x80"),
            ('kvd_transfers_done_total{instance="a"}', "0+9x80"),
            ('kvd_uptime_seconds{instance="a"}', "0+15x80"),
        ],
        {},
    ),
    "KvdPromptsComputedTwice": (
        [
            (
                f'kvd_prompt_tokens_served_total{{instance="a",engine="d",role="decode",outcome="{outcome}"}}',
                rate,
            )
            for outcome, rate in (("loaded", "0+8x80"), ("plain", "0+2x80"))
        ],
        {"engine": "d"},
    ),
    "KvdPrefillsUnclaimed": (
        [
            ('kvd_prefills_kept_total{instance="a",engine="p"}', "0+4x80"),
            ('kvd_prefills_claimed_total{instance="a",engine="p"}', "0+1x80"),
        ],
        {"engine": "p"},
    ),
    "KvdLeasesExpire": (
        [
            ('kvd_leases_expired_total{instance="a"}', "0+1x80"),
            ('kvd_uptime_seconds{instance="a"}', "0+15x80"),
        ],
        {},
    ),
    "KvdChecksumDiffers": (
        [('kvd_checksums_total{instance="a",result="differs"}', "_x20 1x60")],
        {"result": "differs"},
    ),
    "KvdEngineDrains": ([('kvd_engine_draining{instance="a",engine="p"}', "1x200")], {"engine": "p"}),
    "KvdImpostor": ([('kvd_peers_impostors_total{instance="a"}', "_x20 2x60")], {}),
}
"""Of each alert the series, a value each 15 s, that make it fire, and the labels that it has besides the host's."""
WELL_AT_ONE = ("KvdDown", "KvdLedgerAway", "KvdPeerDown")
"""Alerts on a gauge that is 1 while all is well; others are quiet at 0."""
AT = {"KvdEngineDrains": "40m", "KvdInternalErrors": "8m", "KvdChecksumDiffers": "8m", "KvdImpostor": "8m"}
"""When it is looked at, where that is not after 18 minutes."""


def rules(name: str) -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load((CONFIGS / name).read_text())["groups"] for rule in group["rules"]
    ]


RECORDED = [rule["record"] for rule in rules("kvd-rules.yaml")]
ALERTS = {rule["alert"]: rule for rule in rules("kvd-alerts.yaml")}
DASHBOARD = json.loads((CONFIGS / "kvd-dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [
    *(rule["expr"] for rule in (*rules("kvd-rules.yaml"), *ALERTS.values())),
    *(target["expr"] for panel in PANELS for target in panel["targets"]),
    DASHBOARD["templating"]["list"][1]["query"]["query"],
]


def documented() -> list[str]:
    """Patterns of the names in docs/metrics.md."""
    cells = METRIC.findall((ROOT / "docs" / "metrics.md").read_text())
    names = [name for cell in cells for name in re.findall(r"`(\S+?)`", cell)]
    assert len(names) > 80
    return [re.sub(r"<\w+>", "[a-z0-9_]+", name) for name in names]


def test_every_metric_that_is_asked_for_is_one_that_there_is() -> None:
    patterns = documented()
    asked = {name for expression in EXPRESSIONS for name in NAME.findall(expression)}
    assert len(asked) > 30
    known = {name for name in asked if name in RECORDED or any(re.fullmatch(p, name) for p in patterns)}
    assert asked - known == set()


def test_each_alert_has_its_section_with_what_why_and_next() -> None:
    sections = dict(re.findall(r"^## (Kvd\w+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    assert list(sections) == list(ALERTS) == list(SERIES)
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook"] == f"docs/monitoring.md#{name.lower()}"
        assert re.findall(r"^\*\*(\w+)\.\*\*", sections[name], re.MULTILINE) == ["What", "Why", "Next"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_the_dashboard_s_panels_have_ids_places_and_questions_of_their_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        references = [target["refId"] for target in panel["targets"]]
        assert references == sorted(set(references))
    assert isinstance(DASHBOARD["schemaVersion"], int)


def checked(tool: str, *arguments: str, folder: Path = CONFIGS) -> str:
    done = subprocess.run([tool, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_takes_the_files_and_each_alert_fires_where_it_should(tmp_path: Path) -> None:
    tool = promtool()
    checked(tool, "check", "config", "kvd-scrape.yaml")
    tests: list[dict[str, Any]] = []
    for name, (series, labels) in SERIES.items():
        fired = {"exp_labels": {"instance": "a", "severity": ALERTS[name]["labels"]["severity"], **labels}}
        well = "1x200" if name in WELL_AT_ONE else "0x200"
        for values, alerts in (([value for _, value in series], [fired]), ([well] * len(series), [])):
            given = [{"series": one, "values": value} for (one, _), value in zip(series, values, strict=True)]
            wanted = {"eval_time": AT.get(name, "18m"), "alertname": name, "exp_alerts": alerts}
            tests.append({"interval": "15s", "input_series": given, "alert_rule_test": [wanted]})
    (tmp_path / "kvd-rules.yaml").write_text((CONFIGS / "kvd-rules.yaml").read_text())
    # promtool compares annotations too, which are texts for people.
    alerts = yaml.safe_load((CONFIGS / "kvd-alerts.yaml").read_text())
    for rule in (rule for group in alerts["groups"] for rule in group["rules"]):
        del rule["annotations"]
    (tmp_path / "kvd-alerts.yaml").write_text(yaml.safe_dump(alerts))
    made = {"rule_files": ["kvd-rules.yaml", "kvd-alerts.yaml"], "tests": tests}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(made))
    assert "SUCCESS" in checked(tool, "test", "rules", "test.yaml", folder=tmp_path)
