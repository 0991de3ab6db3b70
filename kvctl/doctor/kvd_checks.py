"""kvd itself: whether it answers and keeps up, its peers, the engines and workers that it knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvctl import daemon
from kvctl.cli.numbers import span
from kvctl.cli.own_version import kvctl_version
from kvctl.cli.settings import Settings
from kvctl.errors import KvctlError
from kvctl.views.doctor import Check
from kvctl.views.engines import endpoint_name
from kvd.topology.findings import unknown_weights
from kvd.wire import query

LONG_TURN = 0.25
"""Seconds. While kvd is busy with one thing for so long it answers nobody: a heartbeat is late."""


def kvd_checks(settings: Settings) -> tuple[list[Check], list[int] | None]:
    """The checks, and the processes of this host's workers; None where kvd does not answer."""
    try:
        status = daemon.ask(settings, query.GetStatus(), query.KvdStatus)
        engines = daemon.ask(settings, query.ListEngines(), query.EngineList).rows
        workers = daemon.ask(settings, query.ListWorkers(), query.WorkerList).rows
    except KvctlError as error:
        return [Check(code="KVD", about="kvd", state="failed", found=error.message, hint=error.hint)], None
    checks = [*_itself(status), *_pace(status), *_peers(status), *_engines(engines), *_workers(workers)]
    return checks, [row.pid for row in workers if row.kind == "worker" and row.state != "gone"]


def _itself(status: query.KvdStatus) -> Iterator[Check]:
    mine, what = kvctl_version(), f"{status.kvd_id} {status.version}, pid {status.pid}"
    if status.draining:
        yield Check(
            code="KVD_DRAINING", about="kvd", state="warning", found=f"{what} is stopping",
            hint="it takes nothing new; wait for it, or start it again: systemctl start kvd",
        )  # fmt: skip
    elif mine not in (status.version, "unknown"):
        yield Check(
            code="KVD_VERSION", about="kvd", state="warning", found=f"kvd is {status.version} and kvctl {mine}",
            hint="after an upgrade it is to be restarted: systemctl restart kvd; workers register again",
        )  # fmt: skip
    else:
        up = span(status.gauges.get("uptime_seconds", 0.0))
        yield Check(code="KVD", about="kvd", state="ok", found=f"{what}, up {up}")


def _pace(status: query.KvdStatus) -> Iterator[Check]:
    recent = status.gauges.get("loop.recent_turn_seconds", 0.0)
    lost = {
        name: status.counters.get(name, 0)
        for name in ("sent.dropped", "log.lines_dropped", "errors.internal")
    }
    if recent >= LONG_TURN:
        yield Check(
            code="KVD_SLOW", about="kvd", state="warning",
            found=f"was busy with one thing for {span(recent)} lately, and answered nobody meanwhile",
            hint="is the host overloaded, or its disk slow? see the gauges in kvctl status",
        )  # fmt: skip
    if any(lost.values()):
        told = ", ".join(f"{name} {count}" for name, count in lost.items() if count)
        yield Check(
            code="KVD_LOSSES", about="kvd", state="warning", found=f"since it started: {told}",
            hint="clients ask again for what was dropped; internal errors are in its log: journalctl -u kvd",
        )  # fmt: skip
    if recent < LONG_TURN and not any(lost.values()):
        yield Check(
            code="KVD_PACE",
            about="kvd",
            state="ok",
            found=f"answers; its longest turn of late took {span(recent)}",
        )


def _peers(status: query.KvdStatus) -> Iterator[Check]:
    down = [peer for peer in status.peers if peer.state != "up"]
    for peer in down:
        yield Check(
            code="PEER_DOWN", about="kvd", state="warning",
            found=f"kvd at {endpoint_name(peer.endpoint) or '?'} is {peer.state}",
            hint="does it run, may this host reach that port, do both have the keys? its log and kvctl events tell",
        )  # fmt: skip
    if down:
        return
    if status.peers:
        yield Check(code="PEERS", about="kvd", state="ok", found=f"{len(status.peers)} linked, all up")
    elif endpoint_name(status.endpoint) is None:
        yield Check(
            code="PEERS", about="kvd", state="ok", found="no peer socket: engines of this host only",
            hint="set peer.listen in kvd.yaml for engines of other hosts",
        )  # fmt: skip
    else:
        yield Check(code="PEERS", about="kvd", state="ok", found="none linked yet")


def _engines(rows: Sequence[query.EngineRow]) -> Iterator[Check]:
    if not rows:
        yield Check(
            code="ENGINES", about="engines", state="warning", found="kvd knows no engine",
            hint='start vLLM with --kv-transfer-config \'{"kv_connector": "KvdConnector", ...}\': docs/connector.md',
        )  # fmt: skip
    for row in rows:
        name = row.engine.engine_id
        if row.state == "ready":
            for finding in unknown_weights(name, row.engine.facts):
                yield Check(
                    code=finding.code, about="engines", state="warning", found=finding.message,
                    hint='set "weights" in kv_connector_extra_config to one id on all engines of this model',
                )  # fmt: skip
            if row.policy == "fail":
                yield Check(
                    code="POLICY_FAIL", about="engines", state="warning",
                    found=f"{name} fails requests whose load misses",
                    hint="start it with kv_load_failure_policy recompute to have them computed instead",
                )  # fmt: skip
            continue
        yield Check(
            code=f"ENGINE_{row.state.upper()}", about="engines", state="warning",
            found=f"{name} is {row.state}, {len(row.ranks)} of {row.engine.world_size} ranks: {row.reason}",
            hint="see kvctl workers and the engine's own log",
        )  # fmt: skip
    ready = [row.engine.engine_id for row in rows if row.state == "ready"]
    if ready:
        yield Check(
            code="ENGINES", about="engines", state="ok", found=f"{len(ready)} ready: {', '.join(ready)}"
        )


def _workers(rows: Sequence[query.WorkerRow]) -> Iterator[Check]:
    for row in rows:
        if row.state == "silent":
            yield Check(
                code="WORKER_SILENT", about="engines", state="warning",
                found=f"a {row.kind} of {row.engine_id}, pid {row.pid}, said nothing for {span(row.heartbeat_age)}",
                hint=f"is it stopped or stuck? see State in /proc/{row.pid}/status",
            )  # fmt: skip
