"""Answers to operators: engines, workers, status."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass
from operator import itemgetter

import msgspec

from kvd.geometry.rank import Rank
from kvd.installed import own_version
from kvd.service.daemon import Daemon
from kvd.service.engines.local_engine import Client, LocalEngine
from kvd.service.fairness.budget import ALL
from kvd.service.handlers.pages import PAGE_ROWS, PlacedRows, page, place
from kvd.service.handlers.sight import hidden_engine, hidden_worker, own_engines, sight_of
from kvd.service.log import dropped
from kvd.service.peers.trust import identity_of
from kvd.service.permission import EVERYTHING, Sight
from kvd.service.sockets.router import Caller
from kvd.wire.identity import HERE, Endpoint, EngineCard
from kvd.wire.limits import MOST
from kvd.wire.query import (
    EngineList,
    EngineRow,
    KvdStatus,
    ListEngines,
    ListWorkers,
    PeerKeys,
    WorkerList,
    WorkerRow,
)

STARTED_WITH = own_version()
"""Not what is installed later, while this kvd runs on."""
EnginePlace = tuple[bool, str, str, int]
"""Whether it is a peer's, its id, and its kvd's endpoint."""
WorkerPlace = tuple[str, bool, tuple[int, int, int], float, str]
"""Its engine, whether it is a scheduler, its rank as ranks are sorted, when it registered, and its incarnation."""

_ENGINE_PLACES = msgspec.json.Decoder(EnginePlace)
_WORKER_PLACES = msgspec.json.Decoder(WorkerPlace)


async def list_engines(daemon: Daemon, caller: Caller, query: ListEngines) -> EngineList:
    """Engines, local ones first. Raises `RequestRefused`."""
    return await _engines(daemon, caller, query, await sight_of(daemon, caller))


async def engines_here(daemon: Daemon, caller: Caller, query: ListEngines) -> EngineList:
    """Our own engines, for another kvd: a fleet asks for the same when told of a change. Raises `RequestRefused`."""
    return await daemon.listed_for_peers.get(
        query, daemon.engine_changes, lambda: _engines(daemon, caller, query, EVERYTHING, local_only=True)
    )


async def _engines(
    daemon: Daemon, caller: Caller, query: ListEngines, sight: Sight, *, local_only: bool = False
) -> EngineList:
    after = place(query.after, _ENGINE_PLACES)
    engines = daemon.registry.engines
    local = sorted(name for name in engines if after is None or (False, name, "", 0) > after)
    if local_only:
        local = [name for name in local if engines[name].elsewhere is None]  # its home tells of it
    peers = (
        (True, engine_id, where.host, where.port)
        for where, engine_id in daemon.handshakes.peers
        if where != HERE and not _is_of_ours(daemon, where, engine_id)
    )
    remote = [] if local_only else sorted(at for at in peers if after is None or at > after)
    seen = _Seen(sight, query.cards)
    rows = itertools.chain(
        _local_rows(daemon, local[: PAGE_ROWS + 1], seen), _remote_rows(daemon, remote[: PAGE_ROWS + 1], seen)
    )
    found, more = await page(daemon.slices, caller, rows)
    return EngineList(rows=found, more=more)


def _is_of_ours(daemon: Daemon, where: Endpoint, engine_id: str) -> bool:
    """Whether a peer is the whole of an engine that has workers here, which is shown as a local one."""
    engine = daemon.registry.engines.get(engine_id)
    return engine is not None and engine.elsewhere == where and engine.state != "gone"


@dataclass(frozen=True, slots=True)
class _Seen:
    """Whose engines are shown, and whether with their cards."""

    sight: Sight
    cards: bool


def _local_rows(daemon: Daemon, names: list[str], seen: _Seen) -> PlacedRows[EnginePlace]:
    users: dict[str, set[str]] = {name: set() for name in names}
    for (_, peer_id), peer in list(daemon.handshakes.peers.items()):
        for name in peer.users:
            if name in users:
                users[name].add(peer_id)
        yield None
    for name in names:
        engine = daemon.registry.engines.get(name)
        if engine is not None:
            shown = seen.sight.of(engine.uid)
            row = _local_row(daemon, engine, users[name], cards=seen.cards and shown)
            yield (False, name, "", 0), row if shown else hidden_engine(row)


def _local_row(daemon: Daemon, engine: LocalEngine, peers: set[str], *, cards: bool) -> EngineRow:
    engine_id = engine.facts.engine_id
    peers |= set(daemon.subscribers.users(engine)) if engine.generation else set()
    return EngineRow(
        engine=engine.facts,
        generation=engine.generation,
        local=True,
        state=engine.state,
        ranks=tuple(engine.ranks),
        since=engine.since,
        endpoint=engine.elsewhere or daemon.myself.endpoint,
        scheduler=engine.scheduler is not None,
        policy=engine.scheduler.policy if engine.scheduler else "",
        leases=daemon.leases.count(engine_id),
        reason=engine.reason,
        peers=tuple(sorted(peers)),
        card=_card_of(daemon, engine) if cards and engine.state == "ready" else None,
        draining=engine_id in daemon.drains.of,
        compatibility_class=engine.compatibility_class,
    )


def _card_of(daemon: Daemon, engine: LocalEngine) -> EngineCard | None:
    """The card of an engine that is ready; of one whose home is elsewhere as that gave it, None until then."""
    if engine.elsewhere is None:
        return _without_key(engine.card())
    peer = daemon.handshakes.peers.get((engine.elsewhere, engine.facts.engine_id))
    same = peer is not None and peer.card.generation == engine.generation
    return _without_key(peer.card) if peer is not None and same else None


def _remote_rows(daemon: Daemon, places: list[EnginePlace], seen: _Seen) -> PlacedRows[EnginePlace]:
    own = frozenset[str]() if seen.sight.everything else own_engines(daemon, seen.sight)
    for at in places:
        endpoint = Endpoint(*at[2:])
        peer = daemon.handshakes.peers.get((endpoint, at[1]))
        if peer is None:
            continue
        row = EngineRow(
            engine=peer.card.engine,
            generation=peer.card.generation,
            local=False,
            state=peer.state,
            ranks=tuple(worker.rank for worker in peer.card.workers),
            since=peer.since,
            endpoint=endpoint,
            reason=peer.reason,
            peers=tuple(sorted(peer.users)),
            # Of one that has gone for a while only the name is left, which describes no engine.
            card=_without_key(peer.card) if seen.cards and peer.card.workers else None,
            draining=peer.draining,
            compatibility_class=peer.card.compatibility_class,
        )
        yield at, row if seen.sight.everything or own & peer.friends else hidden_engine(row)


def _without_key(card: EngineCard) -> EngineCard:
    """A card for operators, and what they write to files: the key is for schedulers alone."""
    return msgspec.structs.replace(card, digest_key=b"")


async def list_workers(daemon: Daemon, caller: Caller, query: ListWorkers) -> WorkerList:
    """Local clients, engine by engine, the dead ones that are remembered included. Raises `RequestRefused`."""
    sight = await sight_of(daemon, caller)
    rows = _worker_rows(daemon, place(query.after, _WORKER_PLACES), sight)
    found, more = await page(daemon.slices, caller, rows)
    return WorkerList(rows=found, more=more)


def _worker_rows(daemon: Daemon, after: WorkerPlace | None, sight: Sight) -> PlacedRows[WorkerPlace]:
    engines: dict[str, list[Client]] = {}
    for client in list(daemon.registry.clients.values()):
        if after is None or client.engine.engine_id >= after[0]:
            engines.setdefault(client.engine.engine_id, []).append(client)
        yield None
    now = time.monotonic()
    for engine_id in sorted(engines):
        for at, client in sorted(((_place_of(c), c) for c in engines[engine_id]), key=itemgetter(0)):
            if after is None or at > after:
                row = _worker_row(client, now)
                yield at, row if sight.of(client.uid) else hidden_worker(row)
            else:
                yield None


def _place_of(client: Client) -> WorkerPlace:
    rank = client.rank or Rank()
    in_order = (rank.pp, rank.dcp, rank.tp)
    return (
        client.engine.engine_id,
        client.kind == "scheduler",
        in_order,
        client.registered,
        client.incarnation,
    )


def _worker_row(client: Client, now: float) -> WorkerRow:
    return WorkerRow(
        kind=client.kind,
        engine_id=client.engine.engine_id,
        rank=client.rank,
        pid=client.pid,
        incarnation=client.incarnation,
        state=client.state,
        registered=client.registered,
        heartbeat_age=now - client.last_heard,
        backend=client.card.backend if client.card else "",
        regions=client.regions,
        registered_bytes=client.registered_bytes,
        reason=client.reason,
        at=client.at,
        locality=client.locality,
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
    untrusted = daemon.links.untrusted
    return KvdStatus(
        kvd_id=daemon.myself.kvd_id,
        generation=daemon.myself.generation,
        version=STARTED_WITH,
        pid=os.getpid(),
        host=daemon.myself.host,
        started=daemon.myself.started_at,
        runtime_dir=str(daemon.directory),
        endpoint=daemon.myself.endpoint,
        # Two records of nearly 2**63 bytes must not make the answer one that cannot be told.
        counters={name: min(count, MOST) for name, count in counters.items()},
        gauges=gauges(daemon, len(untrusted)),
        peers=daemon.links.rows(untrusted),
        draining=daemon.draining,
        keys=_peer_keys(daemon),
        ledger_away=daemon.ledger.state.reason,
        ledger_aside=daemon.ledger.state.aside,
        comparing=daemon.comparers.trouble,
        refused=daemon.sockets.refusals.rows(),
        installed=own_version(),
        clock=time.time(),
        membership=daemon.members.row(),
    )


def _peer_keys(daemon: Daemon) -> PeerKeys | None:
    if daemon.peer is None:
        return None
    keys = daemon.keys
    if keys is None:
        return PeerKeys()
    return PeerKeys(
        identity=identity_of(keys),
        public=keys.public.decode(),
        trusted=len(keys.authorised),
        key_file=daemon.config.peer.curve.key_file,
        list_file=daemon.config.peer.curve.authorized_keys,
        error=keys.error,
        twice=keys.twice,
        pair=keys.pair,
    )


def gauges(daemon: Daemon, untrusted: int) -> dict[str, float]:
    """Values of now, by dotted name; ``untrusted`` is how many hosts are to be linked and have no trusted key."""
    names = ["engines.ready", "engines.partial", "engines.gone", "peers.connecting", "peers.up", "peers.down"]
    names += [
        f"{kind}.{state}" for kind in ("workers", "schedulers") for state in ("alive", "silent", "gone")
    ]
    values = dict.fromkeys(names, 0.0)
    for counts in (daemon.registry.counts, daemon.registry.roster.counts):
        values |= {name: float(count) for name, count in counts.of.items()}
    for link in daemon.links.links.values():
        values[f"peers.{link.state}"] += 1
    values["engines.draining"] = float(len(daemon.drains.of))
    values["peers.untrusted"] = float(untrusted)
    membership = daemon.members.row()
    values["membership.members"] = float(membership.members)
    values["membership.vanished"] = float(membership.vanished)
    values["membership.other_key"] = float(membership.other_key)
    values["membership.away"] = float(membership.state == "away")
    values["leases.open"] = float(len(daemon.leases.table))
    values["leases.readers"] = float(daemon.leases.readers)
    values["readers.remembered"] = float(len(daemon.readers.remembered))
    values["pushes.underway"] = float(daemon.push_places.counts[ALL])
    values["requests.waiting"] = float(daemon.local.busy + (daemon.peer.busy if daemon.peer else 0))
    values["received.reserved_bytes"] = float(daemon.sockets.shared.reservations.total)
    values["sent.unread_bytes"] = float(daemon.sockets.shared.unsent.total)
    values["peer_engines.known"] = float(len(daemon.handshakes.peers))
    values["prefixes.tags"] = float(daemon.hints.kept)
    values["prefixes.followed"] = float(len(daemon.followers))
    values["handshakes.prepared"] = float(daemon.prepared and not daemon.comparers.trouble)
    values["ledger.open"] = float(daemon.ledger.state.open)
    values["ledger.rows"] = float(daemon.ledger.state.rows)
    values["loop.lag_seconds"] = daemon.loop_lag
    values["loop.longest_turn_seconds"] = daemon.loop_monitor.longest
    values["loop.busiest_turn_seconds"] = daemon.loop_monitor.busiest
    values["loop.recent_turn_seconds"] = daemon.loop_monitor.recent
    values["uptime_seconds"] = time.monotonic() - daemon.myself.started
    return values
