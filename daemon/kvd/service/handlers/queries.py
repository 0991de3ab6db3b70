"""Answers to operators: engines, workers, status, made from the daemon's state at one moment."""

from __future__ import annotations

import os
import time
from importlib.metadata import PackageNotFoundError, version

import msgspec

from kvd.geometry.rank import Rank
from kvd.service.log import dropped
from kvd.service.parts import Parts
from kvd.service.peers.handshakes import HERE
from kvd.wire.identity import EngineCard
from kvd.wire.query import EngineRow, Engines, ListEngines, Status, WorkerRow, Workers


def engines(parts: Parts, query: ListEngines, *, local_only: bool = False) -> Engines:
    """All engines, local ones first; for other kvds the local ones alone."""
    rows = [_local_row(parts, engine_id, cards=query.cards) for engine_id in sorted(parts.registry.engines)]
    if not local_only:
        remote = sorted(
            (k for k in parts.handshakes.peers if k[0] != HERE), key=lambda k: (k[1], k[0].host, k[0].port)
        )
        for key in remote:
            peer = parts.handshakes.peers[key]
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
    return Engines(rows=tuple(rows))


def _local_row(parts: Parts, engine_id: str, *, cards: bool) -> EngineRow:
    engine = parts.registry.engines[engine_id]
    peers = {key[1] for key, peer in parts.handshakes.peers.items() if engine_id in peer.users}
    peers |= set(parts.askers.users(engine)) if engine.generation else set()
    return EngineRow(
        engine=engine.facts,
        generation=engine.generation,
        local=True,
        state=engine.state,
        ranks=tuple(sorted(engine.workers)),
        since=engine.since,
        endpoint=parts.myself.endpoint,
        scheduler=engine.scheduler is not None,
        policy=engine.scheduler.policy if engine.scheduler else "",
        leases=parts.leases.count(engine_id),
        reason=engine.reason,
        peers=tuple(sorted(peers)),
        card=_without_key(engine.card()) if cards and engine.state == "ready" else None,
    )


def _without_key(card: EngineCard) -> EngineCard:
    """A card for operators, and what they write to files: the key is for schedulers alone."""
    return msgspec.structs.replace(card, digest_key=b"")


def workers(parts: Parts) -> Workers:
    """All local clients, engine by engine, the dead ones that are remembered included."""
    now = time.monotonic()
    clients = sorted(
        parts.registry.clients.values(),
        key=lambda c: (c.engine.engine_id, c.kind == "scheduler", c.rank or Rank(), c.registered),
    )
    return Workers(
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


def status(parts: Parts) -> Status:
    """This kvd now."""
    return Status(
        kvd_id=parts.myself.kvd_id,
        generation=parts.myself.generation,
        version=own_version(),
        pid=os.getpid(),
        host=parts.myself.host,
        started=parts.myself.started_at,
        runtime_dir=str(parts.directory),
        endpoint=parts.myself.endpoint,
        counters={**parts.counters, "loop.turns_long": parts.turns.long, "log.lines_dropped": dropped()},
        gauges=gauges(parts),
        peers=tuple(link.row() for link in parts.links.links.values()),
        draining=parts.draining,
    )


def gauges(parts: Parts) -> dict[str, float]:
    """Values of now, by dotted name."""
    names = ["engines.ready", "engines.partial", "engines.gone", "peers.connecting", "peers.up", "peers.down"]
    names += [
        f"{kind}.{state}" for kind in ("workers", "schedulers") for state in ("alive", "silent", "gone")
    ]
    values = dict.fromkeys(names, 0.0)
    for engine in parts.registry.engines.values():
        values[f"engines.{engine.state}"] += 1
    for client in parts.registry.clients.values():
        values[f"{client.kind}s.{client.state}"] += 1
    for link in parts.links.links.values():
        values[f"peers.{link.state}"] += 1
    values["leases.open"] = float(len(parts.leases.table))
    values["leases.readers"] = float(parts.leases.readers())
    values["readers.remembered"] = float(len(parts.readers.remembered))
    values["pushes.underway"] = float(parts.pushes_underway)
    values["requests.waiting"] = float(parts.local.busy + (parts.peer.busy if parts.peer else 0))
    values["peer_engines.known"] = float(len(parts.handshakes.peers))
    values["handshakes.prepared"] = float(parts.prepared)
    values["loop.lag_seconds"] = parts.loop_lag
    values["loop.longest_turn_seconds"] = parts.turns.longest
    values["loop.busiest_turn_seconds"] = parts.turns.busiest
    values["loop.recent_turn_seconds"] = parts.turns.recent
    values["uptime_seconds"] = time.monotonic() - parts.myself.started
    return values


def own_version() -> str:
    """The installed version, or ``0+source`` when run from a checkout."""
    try:
        return version("kvctl")
    except PackageNotFoundError:
        return "0+source"
