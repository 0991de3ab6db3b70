"""kvd itself: whether it answers and keeps up, its peers, the engines and workers that it knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from kvctl import daemon
from kvctl.cli.numbers import span
from kvctl.cli.settings import Settings
from kvctl.doctor.checks import checked
from kvctl.errors import KvctlError
from kvctl.processes.supervisor import its_log, start_again
from kvctl.views.doctor import Check
from kvctl.views.engines import endpoint_name
from kvd.installed import UNINSTALLED, own_version
from kvd.topology.findings import unknown_weights
from kvd.wire import query

LONG_TURN = 0.25
"""Seconds. While kvd is busy with one thing for so long it answers nobody: a heartbeat is late."""

LATELY_SECONDS = 600.0
"""Whoever was refused before that has given up, or been let in."""

_kvd = partial(checked, "kvd")
_engine = partial(checked, "engines")


def kvd_checks(settings: Settings) -> tuple[list[Check], list[int] | None]:
    """The checks, and the processes of this host's workers; None where kvd does not answer."""
    try:
        status = daemon.ask(settings, query.GetStatus(), query.KvdStatus)
        engines = daemon.engines(settings)
        workers = daemon.workers(settings)
    except KvctlError as error:
        return [_kvd("failed", "KVD", error.message, error.hint)], None
    alive = [row.pid for row in workers if row.kind == "worker" and row.state != "gone" and row.at is None]
    return checks_of(status, engines, workers), alive


def checks_of(
    status: query.KvdStatus, engines: Sequence[query.EngineRow], workers: Sequence[query.WorkerRow]
) -> list[Check]:
    """The checks of what a kvd answered; of one on another host ``status`` has no pid, which means nothing here."""
    return [
        *_itself(status),
        *_pace(status),
        *_peers(status),
        *_refused(status),
        *_keys(status),
        *_engines(engines),
        *_workers(workers),
    ]


def _itself(status: query.KvdStatus) -> Iterator[Check]:
    mine = own_version() if status.pid else status.version
    what = f"{status.kvd_id} {status.version}" + f", pid {status.pid}" * bool(status.pid)
    if status.draining:
        yield _kvd(
            "warning", "KVD_DRAINING", f"{what} is stopping",
            f"it takes nothing new; wait for it, or start it again: {start_again(status.pid)}",
        )  # fmt: skip
    elif status.installed not in ("", status.version, UNINSTALLED):
        yield _kvd(
            "warning", "KVD_VERSION", f"kvd was started with {status.version}, and {status.installed} is installed now",
            f"after an upgrade it is to be restarted: {start_again(status.pid)}; workers register again",
        )  # fmt: skip
    elif mine not in (status.version, UNINSTALLED):
        yield _kvd(
            "warning", "KVD_VERSION", f"kvd is {status.version} and kvctl {mine}",
            f"after an upgrade it is to be restarted: {start_again(status.pid)}; workers register again",
        )  # fmt: skip
    else:
        yield _kvd("ok", "KVD", f"{what}, up {span(status.gauges.get('uptime_seconds', 0.0))}")


def _pace(status: query.KvdStatus) -> Iterator[Check]:
    recent = status.gauges.get("loop.recent_turn_seconds", 0.0)
    kinds = ("sent.dropped", "log.lines_dropped", "errors.internal")
    lost = ", ".join(f"{kind} {count}" for kind in kinds if (count := status.counters.get(kind)))
    if recent >= LONG_TURN:
        yield _kvd(
            "warning", "KVD_SLOW", f"was busy with one thing for {span(recent)} lately, and answered nobody meanwhile",
            "is the host overloaded, or its disk slow? see the gauges in kvctl status",
        )  # fmt: skip
    if lost:
        yield _kvd(
            "warning", "KVD_LOSSES", f"since it started: {lost}",
            f"clients ask again for what was dropped; internal errors are in its log: {its_log(status.pid)}",
        )  # fmt: skip
    if recent < LONG_TURN and not lost:
        yield _kvd("ok", "KVD_PACE", f"answers; its longest turn of late took {span(recent)}")
    if status.ledger_away:
        yield _kvd(
            "warning", "LEDGER_AWAY", f"its ledger cannot be written: {status.ledger_away}",
            "records wait with the workers for ten minutes; see the disk and the owner of its state directory; it is"
            f" tried again every 10 s: {its_log(status.pid)}",
        )  # fmt: skip
    if status.ledger_aside:
        being_read = [name for name in status.ledger_aside if ".damaged-" in name]
        done = [name for name in status.ledger_aside if name not in being_read]
        steps = [
            f"kvd's log of that time says how many were taken over ({its_log(status.pid)}); is the disk sound?",
            f"leave {', '.join(being_read)} alone: kvd still takes over what can be read of it"
            * bool(being_read),
            f"to end this warning delete {', '.join(done)}" * bool(done),
        ]
        yield _kvd(
            "warning", "LEDGER_DAMAGED",
            "a damaged ledger was set aside; what cannot be read of it is lost: "
            f"{', '.join(status.ledger_aside)} in its state directory",
            "; ".join(filter(None, steps)),
        )  # fmt: skip
    if (members := status.membership) is not None and members.state == "away":
        yield _kvd(
            "warning", "MEMBERSHIP_AWAY",
            f"{members.source}, which names the other kvds, is away since {span(members.age)}: {members.reason}",
            f"the {members.members} that are known stay linked, new ones are not found; see membership in kvd.yaml, and"
            f" {members.source} itself",
        )  # fmt: skip
    if status.comparing:
        yield _kvd(
            "failed", "COMPARING", f"no engine is introduced to one that it does not know yet: {status.comparing}",
            "see that kvd's user may execute its Python (not below /root or /home), and that there is memory; then"
            " start kvd again",
        )  # fmt: skip


def _peers(status: query.KvdStatus) -> Iterator[Check]:
    down = [peer for peer in status.peers if peer.state != "up"]
    for peer in down:
        if peer.state == "untrusted":
            yield _kvd(
                "warning",
                "PEER_UNTRUSTED",
                peer.reason,
                f"{'type ' * peer.hint.startswith('`')}{peer.hint}",
            )
            continue
        why = f": {peer.reason}" if peer.reason else ""
        yield _kvd(
            "warning", "PEER_DOWN", f"kvd at {endpoint_name(peer.endpoint) or '?'} is {peer.state}{why}",
            peer.hint or "does it run, may this host reach that port, do both have the keys? its log and kvctl events"
            " tell",
        )  # fmt: skip
    if status.peers:
        if not down:
            yield _kvd("ok", "PEERS", f"{len(status.peers)} linked, all up")
    elif endpoint_name(status.endpoint) is None:
        yield _kvd(
            "ok", "PEERS", "no peer socket: engines of this host only",
            "set peer.listen in kvd.yaml for engines of other hosts",
        )  # fmt: skip
    else:
        yield _kvd("ok", "PEERS", "none linked yet")


def _refused(status: query.KvdStatus) -> Iterator[Check]:
    """Who was not let in of late. One that was revoked here is kept out as it should be."""
    for one in status.refused:
        if one.age > LATELY_SECONDS:
            continue
        often = f"{one.times} times, last {span(one.age)} ago"
        if one.was:
            yield _kvd(
                "ok", "KEY_REVOKED",
                f"{one.address} was not let in, {often}: its key {one.key} was revoked here (it was {one.was})",
            )  # fmt: skip
        elif one.key:
            yield _kvd(
                "warning", "KEY_REFUSED",
                f"{one.address} was not let in, {often}: its key {one.key} is not trusted here",
                f"if `kvctl keys show` there prints that key: kvctl keys trust '{one.key}' HOST:PORT; else find out who"
                " has that address",
            )  # fmt: skip
        else:
            yield _kvd(
                "warning", "KEY_EXPECTED",
                f"{one.address} was not let in, {often}: it expects another key of this host than kvd runs with",
                f"there, type {_others_type(status)} --replace",
            )  # fmt: skip


def _others_type(status: query.KvdStatus) -> str:
    """How other hosts trust this one's key."""
    public = status.keys.public if status.keys is not None else "KEY"
    return f"kvctl keys trust '{public}' {endpoint_name(status.endpoint) or 'HOST:PORT'}"


def _keys(status: query.KvdStatus) -> Iterator[Check]:
    keys = status.keys
    if keys is None or keys.identity == "none":
        return
    if keys.error:
        yield _kvd(
            "warning", "KEYS_UNREADABLE", f"the list of trusted keys is not read, the one before stays: {keys.error}",
            "a key that was revoked since is still let in: put the file right; kvctl keys show reads it",
        )  # fmt: skip
    elif keys.identity == "shared":
        yield _kvd(
            "warning", "KEYS_SHARED",
            "all hosts share one pair of keys: each may release leases and speak for engines of the others",
            "kvctl keys generate makes a pair for each host: docs/deploy.md",
        )  # fmt: skip
    else:
        yield _kvd("ok", "KEYS", f"a key for each host, {keys.trusted} trusted")
    if keys.twice:
        yield _kvd(
            "warning", "KEYS_TWICE", f"{keys.twice} in {keys.list_file}: both are let in, and the last one counts",
            "find out which it is (kvctl keys show there), then kvctl keys revoke the other",
        )  # fmt: skip
    if keys.pair:
        yield _kvd(
            "warning", "KEYS_PAIR", f"kvd will not be who it is once it is started again: {keys.pair}",
            f"a new pair: start kvd again ({start_again(status.pid)}), and have the others type kvctl keys trust with"
            " --replace; else put the file back",
        )  # fmt: skip


def _engines(rows: Sequence[query.EngineRow]) -> Iterator[Check]:
    if not rows:
        yield _engine(
            "warning", "ENGINES", "kvd knows no engine",
            'start vLLM with --kv-transfer-config \'{"kv_connector": "KvdConnector", ...}\': docs/connector.md',
        )  # fmt: skip
    for row in rows:
        name = row.engine.engine_id
        if row.state == "ready":
            for finding in unknown_weights(name, row.engine.facts):
                yield _engine(
                    "warning", finding.code, finding.message,
                    'set "weights" in kv_connector_extra_config to one id on all engines of this model',
                )  # fmt: skip
            if row.policy == "fail":
                yield _engine(
                    "warning", "POLICY_FAIL", f"{name} fails requests whose load misses",
                    "start it with kv_load_failure_policy recompute to have them computed instead",
                )  # fmt: skip
            continue
        yield _engine(
            "warning", f"ENGINE_{row.state.upper()}",
            f"{name} is {row.state}, {len(row.ranks)} of {row.engine.world_size} ranks: {row.reason}",
            "see kvctl workers and the engine's own log",
        )  # fmt: skip
    ready = [row.engine.engine_id for row in rows if row.state == "ready"]
    if ready:
        yield _engine("ok", "ENGINES", f"{len(ready)} ready: {', '.join(ready)}")


def _workers(rows: Sequence[query.WorkerRow]) -> Iterator[Check]:
    for row in rows:
        if row.state == "silent":
            yield _engine(
                "warning", "WORKER_SILENT",
                f"a {row.kind} of {row.engine_id}, pid {row.pid}, said nothing for {span(row.heartbeat_age)}",
                f"is it stopped or stuck? see `kvctl workers` on the host of the kvd at {row.at}"
                if row.at
                else f"is it stopped or stuck? see State in /proc/{row.pid}/status",
            )  # fmt: skip
