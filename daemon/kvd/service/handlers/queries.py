"""Answers to operators: engines, workers, status, made from the daemon's state at one moment."""

from __future__ import annotations

import os
import time

import msgspec

from kvd.geometry.rank import Rank
from kvd.installed import own_version
from kvd.service.daemon import Daemon
from kvd.service.log import dropped
from kvd.service.peers.peer_engine import HERE
from kvd.service.sockets.router import Caller
from kvd.wire.identity import EngineCard
from kvd.wire.query import EngineList, EngineRow, KvdStatus, ListEngines, ListWorkers, WorkerList, WorkerRow


def list_engines(
    daemon: Daemon, _caller: Caller, query: ListEngines, *, local_only: bool = False
) -> EngineList:
    """All engines, local ones first; for other kvds the local ones alone."""
    rows = [_local_row(daemon, engine_id, cards=query.cards) for engine_id in sorted(daemon.registry.engines)]
    if not local_only:
        remote = sorted(
            (k for k in daemon.handshakes.peers if k[0] != HERE), key=lambda k: (k[1], k[0].host, k[0].port)
        )
        for key in remote:
            peer = daemon.handshakes.peers[key]
            rows.append(
                EngineRow(
                    engine=peer.card.engine,
                    generation=peer.card.generation,
                    local=False,
                    state=peer.state,
                    ranks=tuple(worker.rank for worker in peer.card.workers),
                    since=peer.since,
                    endpoint=key[0],
                    reason=peer.reason,
                    peers=tuple(sorted(peer.users)),
                    card=_without_key(peer.card) if query.cards else None,
                )
            )
    return EngineList(rows=tuple(rows))


def _local_row(daemon: Daemon, engine_id: str, *, cards: bool) -> EngineRow:
    engine = daemon.registry.engines[engine_id]
    peers = {key[1] for key, peer in daemon.handshakes.peers.items() if engine_id in peer.users}
    peers |= set(daemon.subscribers.users(engine)) if engine.generation else set()
    return EngineRow(
        engine=engine.facts,
        generation=engine.generation,
        local=True,
        state=engine.state,
        ranks=tuple(sorted(engine.workers)),
        since=engine.since,
        endpoint=daemon.myself.endpoint,
        scheduler=engine.scheduler is not None,
        policy=engine.scheduler.policy if engine.scheduler else "",
        leases=daemon.leases.count(engine_id),
        reason=engine.reason,
        peers=tuple(sorted(peers)),
        card=_without_key(engine.card()) if cards and engine.state == "ready" else None,
    )


def _without_key(card: EngineCard) -> EngineCard:
    """A card for operators, and what they write to files: the key is for schedulers alone."""
    return msgspec.structs.replace(card, digest_key=b"")


def list_workers(daemon: Daemon, _caller: Caller, _query: ListWorkers) -> WorkerList:
    """All local clients, engine by engine, the dead ones that are remembered included."""
    now = time.monotonic()
    clients = sorted(
        daemon.registry.clients.values(),
        key=lambda c: (c.engine.engine_id, c.kind == "scheduler", c.rank or Rank(), c.registered),
    )
    return WorkerList(
        rows=tuple(
            WorkerRow(
                kind=c.kind,
                engine_id=c.engine.engine_id,
                rank=c.rank,
                pid=c.pid,
                incarnation=c.incarnation,
                state=c.state,
                registered=c.registered,
                heartbeat_age=now - c.heard,
                backend=c.card.backend if c.card else "",
                regions=c.regions,
                registered_bytes=c.registered_bytes,
                reason=c.reason,
            )
            for c in clients
        )
    )


def status(daemon: Daemon) -> KvdStatus:
    """This kvd now. A transfer that missed is counted by its code; what they add up to is made here."""
    counters = {
        **daemon.counters,
        "loop.turns_long": daemon.loop_monitor.long,
        "log.lines_dropped": dropped(),
    }
    if misses := [count for name, count in counters.items() if name.startswith("misses.")]:
        counters["transfers.miss"] = sum(misses)
    return KvdStatus(
        kvd_id=daemon.myself.kvd_id,
        generation=daemon.myself.generation,
        version=own_version(),
        pid=os.getpid(),
        host=daemon.myself.host,
        started=daemon.myself.started_at,
        runtime_dir=str(daemon.directory),
        endpoint=daemon.myself.endpoint,
        counters=counters,
        gauges=gauges(daemon),
        peers=tuple(link.row() for link in daemon.links.links.values()),
        draining=daemon.draining,
        ledger_away=daemon.ledger.state.reason,
    )


def gauges(daemon: Daemon) -> dict[str, float]:
    """Values of now, by dotted name."""
    names = ["engines.ready", "engines.partial", "engines.gone", "peers.connecting", "peers.up", "peers.down"]
    names += [
        f"{kind}.{state}" for kind in ("workers", "schedulers") for state in ("alive", "silent", "gone")
    ]
    values = dict.fromkeys(names, 0.0)
    for engine in daemon.registry.engines.values():
        values[f"engines.{engine.state}"] += 1
    for client in daemon.registry.clients.values():
        values[f"{client.kind}s.{client.state}"] += 1
    for link in daemon.links.links.values():
        values[f"peers.{link.state}"] += 1
    values["leases.open"] = float(len(daemon.leases.table))
    values["leases.readers"] = float(daemon.leases.readers)
    values["readers.remembered"] = float(len(daemon.readers.remembered))
    values["pushes.underway"] = float(daemon.pushes_underway)
    values["requests.waiting"] = float(daemon.local.busy + (daemon.peer.busy if daemon.peer else 0))
    values["peer_engines.known"] = float(len(daemon.handshakes.peers))
    values["handshakes.prepared"] = float(daemon.prepared)
    values["ledger.open"] = float(daemon.ledger.state.open)
    values["ledger.rows"] = float(daemon.ledger.state.rows)
    values["loop.lag_seconds"] = daemon.loop_lag
    values["loop.longest_turn_seconds"] = daemon.loop_monitor.longest
    values["loop.busiest_turn_seconds"] = daemon.loop_monitor.busiest
    values["loop.recent_turn_seconds"] = daemon.loop_monitor.recent
    values["uptime_seconds"] = time.monotonic() - daemon.myself.started
    return values
