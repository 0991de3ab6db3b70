"""docs/metrics.md: every metric of a running kvd stands there with its type and labels, and nothing else does."""

from __future__ import annotations

import re
from typing import NamedTuple

from kvd.wire.handshake import GetPeer
from kvd.wire.query import GetStatus
from tests.kvd.service.test_metrics import get
from tests.support.daemons import ROOT, daemons, facts, scheduler, session, wait_for, worker
from tests.support.ports import free_port

PAGE = (ROOT / "docs" / "metrics.md").read_text()
SOURCE = "\n".join(file.read_text() for file in (ROOT / "daemon" / "kvd" / "service").rglob("*.py"))
ROW = re.compile(r"^\| `(kvd_[a-z_<>]+)` \| (counter|gauge) \|(.*?)\| (.+) \|$", re.MULTILINE)
LITERAL = re.compile(r"counters\[\"([a-z_.]+)\"( if [a-z_. ]+ else \"([a-z_.]+)\")?\]")
GAUGE = re.compile(r"values\[\"([a-z_.]+)\"\]")


class Metric(NamedTuple):
    name: str
    kind: str
    labels: frozenset[str]


def documented() -> list[Metric]:
    rows = ROW.findall(PAGE)
    assert len(rows) == PAGE.count("\n| `kvd_"), "a row is not of the form that the others have"
    return [
        Metric(name, kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _meaning in rows
    ]


def stands_there(metric: Metric, rows: list[Metric]) -> bool:
    return any(
        re.fullmatch(re.sub(r"<\w+>", "[a-z0-9_]+", row.name), metric.name) and row[1:] == metric[1:]
        for row in rows
    )


def served(text: str) -> set[Metric]:
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    found = set()
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        found.add(Metric(name, kinds[name], frozenset(re.findall(r'(\w+)="', labels))))
    return found


def test_each_metric_of_a_running_kvd_is_documented() -> None:
    port = free_port()
    with daemons(2) as (kvd, far):
        kvd.kill()
        kvd.environment = {"KVD_METRICS_LISTEN": f"127.0.0.1:{port}"}
        kvd.start()
        engine = facts("e")
        with (
            session(kvd, worker(engine)) as one,
            session(kvd, scheduler(engine)),
            session(far, worker(facts("p"))),
        ):
            ask = GetPeer(local_engine="e", engine_id="p", endpoint=far.status().endpoint)
            one.call(ask, 10.0).result(10)
            kvd.ask_refused(GetPeer(local_engine="none", engine_id="p"))
            wait_for(lambda: "kvd_peer_up" in get(port, "/metrics")[1])
            kvd.ask(GetStatus())
            metrics = served(get(port, "/metrics")[1])
    rows = documented()
    assert [metric for metric in sorted(metrics) if not stands_there(metric, rows)] == []
    gauges = {row.name for row in rows if row.kind == "gauge" and "<" not in row.name}
    assert gauges <= {metric.name for metric in metrics}


def test_each_counter_of_the_source_is_documented_and_each_documented_one_is_counted() -> None:
    names = {name for first, _, other in LITERAL.findall(SOURCE) for name in (first, other) if name}
    counted = {f"kvd_{name.replace('.', '_')}_total" for name in names}
    rows = documented()
    assert [
        name for name in sorted(counted) if not stands_there(Metric(name, "counter", frozenset()), rows)
    ] == []
    plain = {row.name for row in rows if row.kind == "counter" and "<" not in row.name and not row.labels}
    by_kind = {name for name in plain if name.startswith("kvd_leases_")}
    elsewhere = {"kvd_loop_turns_long_total", "kvd_log_lines_dropped_total"}
    assert plain - by_kind - elsewhere - counted == set()
