"""Dispatch: which message is answered by which function, on the local socket and on the peer socket."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any

import msgspec

from kvd.geometry.codec import shape_of
from kvd.geometry.errors import GeometryError
from kvd.service import checksums, orders, pushes, queries, serving
from kvd.service.errors import Refusal
from kvd.service.leases import owner_of
from kvd.service.parts import Parts
from kvd.service.passing import ask_peer, is_ours, passed_on
from kvd.service.registry import Client, Engine
from kvd.service.router import Caller, Handler
from kvd.wire.checksum import GetSums
from kvd.wire.frame import Message
from kvd.wire.handshake import DescribeEngine, EngineDescribed, GetPeer, Ping, Pong
from kvd.wire.identity import EngineCard, EngineFacts, LeaseKey, RankId
from kvd.wire.lease import LeaseClaim, LeaseClaimed, LeaseClosed, LeaseOpened, LeaseRelease
from kvd.wire.names import rank_name
from kvd.wire.order import ClearForced, ForceMiss, GetForced, ReportForced
from kvd.wire.push import PushAnnounce, PushDone, PushProgress, PushWithdraw
from kvd.wire.query import Engines, GetStatus, ListEngines, ListWorkers, Status, Workers
from kvd.wire.registration import (
    Heartbeat,
    NotRegistered,
    Registered,
    RegisterScheduler,
    RegisterWorker,
    Unregister,
)
from kvd.wire.reply import Ok
from kvd.wire.served import GetServed, ReportServed
from kvd.wire.transfer import (
    GetKeptEngine,
    KeptEngine,
    ListTransfers,
    ReportTransfers,
    TransferRecord,
    Transfers,
)

MAX_NAME = 512
"""Longest engine id or incarnation, in characters."""
MAX_KEY = 64
"""Longest key for digests of prompts, in bytes."""
PUSHES: tuple[type[Any], ...] = (PushAnnounce, PushWithdraw, PushProgress, PushDone)


def local_handlers(parts: Parts) -> Mapping[type[Any], Handler]:
    """What workers, schedulers and operators may send."""
    return {
        RegisterWorker: partial(register_worker, parts),
        RegisterScheduler: partial(register_scheduler, parts),
        Heartbeat: partial(heartbeat, parts),
        Unregister: partial(unregister, parts),
        GetPeer: partial(get_peer, parts),
        LeaseOpened: partial(lease_opened, parts),
        LeaseClosed: partial(lease_closed, parts),
        LeaseClaim: partial(lease_claim, parts),
        LeaseRelease: partial(lease_release, parts),
        **dict.fromkeys(PUSHES, partial(pushes.from_worker, parts)),
        GetSums: partial(checksums.from_worker, parts),
        ForceMiss: partial(orders.force_miss, parts),
        ClearForced: partial(orders.clear_forced, parts),
        ReportForced: partial(orders.report_forced, parts),
        GetForced: partial(orders.get_forced, parts),
        ReportTransfers: partial(report_transfers, parts),
        ListTransfers: partial(list_transfers, parts),
        GetKeptEngine: partial(get_kept_engine, parts),
        ListEngines: partial(list_engines, parts),
        ListWorkers: partial(list_workers, parts),
        GetStatus: partial(get_status, parts),
        ReportServed: partial(serving.report_served, parts),
        GetServed: partial(serving.get_served, parts),
    }


def peer_handlers(parts: Parts) -> Mapping[type[Any], Handler]:
    """What other kvds may send. Nothing is ever passed on from here: what it is about is ours, or it is nobody's."""
    return {
        DescribeEngine: partial(describe_engine, parts),
        Ping: partial(ping, parts),
        LeaseClaim: partial(peer_lease_claim, parts),
        LeaseRelease: partial(peer_lease_release, parts),
        **dict.fromkeys(PUSHES, partial(pushes.from_peer, parts)),
        GetSums: partial(checksums.from_peer, parts),
        ListEngines: partial(peer_list_engines, parts),
        GetServed: partial(serving.peer_get_served, parts),
    }


# --- registration ---


def register_worker(parts: Parts, caller: Caller, message: RegisterWorker) -> Registered:
    """Check the card and take the worker. Raises `Refusal`."""
    card = message.card
    _check_identity(card.engine, card.incarnation, card.rank)
    try:
        geometry = parts.decode(card.geometry)
    except GeometryError as error:
        raise Refusal(
            getattr(error, "code", "KVD-GEOMETRY"),
            f"the geometry of {card.engine.engine_id}/{rank_name(card.rank)} cannot be used: {error}",
            hint="worker and kvd should be of one version",
        ) from None
    placed, said = geometry.rank, card.rank
    if (placed.tp, placed.pp, placed.dcp) != (said.tp, said.pp, said.dcp):
        raise Refusal("KVD-BAD-CARD", f"the card says rank {rank_name(said)}, its geometry says {placed}")
    client = Client(
        kind="worker",
        engine=card.engine,
        incarnation=card.incarnation,
        pid=caller.pid or card.pid,
        route=caller.route,
        uid=caller.uid,
        rank=card.rank,
        card=card,
        geometry=geometry,
        shape=shape_of(card.geometry),
        regions=len(geometry.regions),
        registered_bytes=sum(region.length for region in geometry.regions),
    )
    return _take(parts, caller, client)


def register_scheduler(parts: Parts, caller: Caller, message: RegisterScheduler) -> Registered:
    """Take the scheduler and the leases it holds. Raises `Refusal`."""
    _check_identity(message.engine, message.incarnation, None)
    if len(message.digest_key) > MAX_KEY:
        raise Refusal(
            "KVD-BAD-CARD", f"digest_key has {len(message.digest_key)} bytes, wanted are at most {MAX_KEY}"
        )
    client = Client(
        kind="scheduler",
        engine=message.engine,
        incarnation=message.incarnation,
        pid=caller.pid or message.pid,
        route=caller.route,
        uid=caller.uid,
        policy=message.policy,
        digest_key=message.digest_key,
    )
    registered = _take(parts, caller, client)
    parts.leases.present(client, message.leases)
    parts.readers.presents(client, message.readers)
    return registered


def heartbeat(parts: Parts, caller: Caller, message: Heartbeat) -> Registered | NotRegistered:
    """A sign of life."""
    client = parts.registry.heard(message.incarnation, caller.route)
    if client is None:
        return NotRegistered(kvd_generation=parts.myself.generation)
    return registered_as(parts, parts.registry.engines[client.engine.engine_id])


def unregister(parts: Parts, _caller: Caller, message: Unregister) -> Ok:
    """An orderly goodbye; one that is not known has said it already."""
    if client := parts.registry.clients.get(message.incarnation):
        parts.registry.end(client, "it said goodbye", ended=True)
    return Ok()


def registered_as(parts: Parts, engine: Engine) -> Registered:
    """What a client of ``engine`` is told of itself."""
    return Registered(
        kvd_generation=parts.myself.generation,
        engine_generation=engine.generation,
        host=parts.myself.endpoint.host,
        port=parts.myself.endpoint.port,
        heartbeat_seconds=parts.config.liveness.heartbeat_seconds,
    )


def _take(parts: Parts, caller: Caller, client: Client) -> Registered:
    engine = parts.registry.register(client)
    parts.liveness.watch(client, caller.pid)
    return registered_as(parts, engine)


def _check_identity(engine: EngineFacts, incarnation: str, rank: RankId | None) -> None:
    for what, text in (("engine_id", engine.engine_id), ("incarnation", incarnation)):
        if not text or len(text) > MAX_NAME:
            raise Refusal("KVD-BAD-CARD", f"{what} has {len(text)} characters, wanted are 1 to {MAX_NAME}")
    for what in ("tp", "pp", "dcp", "world_size"):
        size = getattr(engine, what)
        place = getattr(rank, what, 0)
        if size < 1 or not 0 <= place < size:
            raise Refusal(
                "KVD-BAD-CARD",
                f"engine {engine.engine_id!r} has {what} {size}, and this worker is {what} rank {place}",
                hint=f"wanted is a rank from 0 to {what} - 1",
            )


# --- handshake ---


def get_peer(parts: Parts, caller: Caller, message: GetPeer) -> Message | Awaitable[Message]:
    """The handshake for a local engine; at once where the peer is known. Raises `Refusal`."""
    if parts.draining:
        raise Refusal("KVD-DRAINING", "this kvd is stopping", hint="ask again when it is back")
    return parts.handshakes.known(message, caller.route) or parts.handshakes.get(message, caller.route)


async def describe_engine(parts: Parts, caller: Caller, message: DescribeEngine) -> EngineDescribed:
    """The card of an engine of ours, for another kvd, which is told when it ends. Raises `Refusal`."""
    wait = parts.registry.wait_up if message.keyed else parts.registry.wait_ready
    engine = await wait(
        message.engine_id, parts.config.peer.handshake_seconds / 2, settling=parts.handshakes.settling
    )
    parts.askers.described(caller.route, message.kvd_id, engine)
    return EngineDescribed(card=engine.card(), kvd_generation=parts.myself.generation, shape=engine.shape)


def ping(parts: Parts, caller: Caller, message: Ping) -> Pong:
    """Here; which of the engines in use are gone, and which there are."""
    gone = parts.askers.pinged(caller.route, message, parts.registry, settling=parts.handshakes.settling)
    ready = tuple((e.facts.engine_id, e.generation) for e in parts.registry.engines.values() if e.up)
    return Pong(kvd_id=parts.myself.kvd_id, kvd_generation=parts.myself.generation, gone=gone, ready=ready)


# --- leases ---


def lease_opened(parts: Parts, caller: Caller, message: LeaseOpened) -> Ok:
    """A scheduler keeps blocks. Raises `Refusal` for anyone else."""
    owner = owner_of(parts.registry.by_route(caller.route), message.engine_id)
    serving.opened(parts, message)
    parts.leases.open(owner, message.leases)
    return Ok()


def lease_closed(parts: Parts, caller: Caller, message: LeaseClosed) -> Ok:
    """A scheduler freed blocks. Raises `Refusal` for anyone else."""
    owner_of(parts.registry.by_route(caller.route), message.engine_id)
    parts.leases.closed(message)
    return Ok()


async def lease_claim(parts: Parts, caller: Caller, message: LeaseClaim) -> LeaseClaimed:
    """A decoder's claim, answered here or by the prefiller's kvd. Raises `Refusal`."""
    settings = parts.config.leases
    parts.readers.claims(parts.registry.behind(caller.route), message, settings.max_seconds)
    answer: Message
    if is_ours(parts, message.key.endpoint):
        answer = await peer_lease_claim(parts, caller, message)
    else:
        answer = await _ask_owner(parts, message.key, message, settings.confirm_seconds + 1.0)
    if not isinstance(answer, LeaseClaimed):
        raise passed_on(answer, message.key.endpoint)
    parts.readers.promised(message.reader, answer.seconds)
    return answer


async def lease_release(parts: Parts, _caller: Caller, message: LeaseRelease) -> Ok:
    """A decoder's release, taken here or by the prefiller's kvd. Raises `Refusal` where it could not be delivered."""
    answer = await release(parts, message)
    parts.readers.released(message.reader)
    return answer


async def release(parts: Parts, message: LeaseRelease) -> Ok:
    """Bring a release to the kvd that has the lease. Raises `Refusal` where it could not be delivered."""
    if is_ours(parts, message.key.endpoint):
        parts.served.claimed(message.key.engine_id, message.key.request_id)
        parts.leases.release(message)
        return Ok()
    answer = await _ask_owner(parts, message.key, message, parts.config.peer.handshake_seconds)
    if not isinstance(answer, Ok):
        raise passed_on(answer, message.key.endpoint)
    return answer


async def peer_lease_claim(parts: Parts, _caller: Caller, message: LeaseClaim) -> LeaseClaimed:
    """A claim on one of our own engines' leases, which another kvd may have passed on."""
    parts.served.claimed(message.key.engine_id, message.key.request_id)
    return await parts.leases.claim(message)


def peer_lease_release(parts: Parts, _caller: Caller, message: LeaseRelease) -> Ok:
    """A release of one of our own engines' leases, which another kvd may have passed on."""
    parts.served.claimed(message.key.engine_id, message.key.request_id)
    parts.leases.release(message)
    return Ok()


async def _ask_owner(parts: Parts, key: LeaseKey, message: Message, seconds: float) -> Message:
    what = f"lease {key.request_id!r} of engine {key.engine_id!r}"
    return await ask_peer(parts, key.endpoint, what, message, seconds)


# --- transfers ---


async def report_transfers(parts: Parts, _caller: Caller, message: ReportTransfers) -> Ok:
    """Take records; answered once they are on disk. Raises `LedgerError`."""
    records = tuple(_with_generation(parts, message.incarnation, record) for record in message.records)
    for record in await parts.ledger.append(records, _unknown_engines(parts, records)):
        parts.counters[f"transfers.{record.state}"] += 1
        if record.checksum.state:
            parts.counters[f"checksums.{record.checksum.state}"] += 1
        if record.state == "done":
            parts.counters["transfers.bytes"] += record.bytes
        else:
            parts.events.emit(
                "transfer.miss", record.request_id, local=record.local_engine, rank=record.local_rank,
                remote=record.remote_engine, cause=record.cause,
            )  # fmt: skip
    return Ok()


def _with_generation(parts: Parts, incarnation: str, record: TransferRecord) -> TransferRecord:
    """The record with the generation of the engine that reports it; a worker does not always know it."""
    client = parts.registry.clients.get(incarnation)
    if record.local_generation or client is None or client.engine.engine_id != record.local_engine:
        return record
    generation = parts.registry.engines[record.local_engine].generation
    return msgspec.structs.replace(record, local_generation=generation)


def _unknown_engines(parts: Parts, records: tuple[TransferRecord, ...]) -> list[EngineCard]:
    """Cards of engines that these records name and the ledger does not have, as far as they are known here."""
    named = {
        key
        for r in records
        for key in ((r.local_engine, r.local_generation), (r.remote_engine, r.remote_generation))
    }
    found = []
    for engine_id, generation in named - parts.ledger.known:
        local = parts.registry.ready(engine_id)
        if local is not None and local.generation == generation:
            found.append(local.card())
            continue
        cards = (peer.card for (_, peer_id), peer in parts.handshakes.peers.items() if peer_id == engine_id)
        found += [card for card in cards if card.generation == generation][:1]
    return found


async def list_transfers(parts: Parts, _caller: Caller, message: ListTransfers) -> Transfers:
    """Rows of the ledger. Raises `LedgerError`."""
    return await parts.ledger.select(message)


async def get_kept_engine(parts: Parts, _caller: Caller, message: GetKeptEngine) -> KeptEngine:
    """An engine that rows of the ledger name. Raises `LedgerError`, and `Refusal` where nothing is kept of it."""
    kept = await parts.ledger.engine(message.engine_id, message.generation)
    if kept is None:
        raise Refusal(
            "KVD-NO-ENGINE",
            f"the ledger has no description of engine {message.engine_id!r} generation {message.generation!r}",
            hint="it is kept for engines that were complete when their transfers were reported",
        )
    return kept


# --- queries ---


def list_engines(parts: Parts, _caller: Caller, message: ListEngines) -> Engines:
    """Local engines and known peers."""
    return queries.engines(parts, message)


def peer_list_engines(parts: Parts, _caller: Caller, message: ListEngines) -> Engines:
    """Our own engines, for another kvd."""
    return queries.engines(parts, message, local_only=True)


def list_workers(parts: Parts, _caller: Caller, _message: ListWorkers) -> Workers:
    """Local workers and schedulers."""
    return queries.workers(parts)


def get_status(parts: Parts, _caller: Caller, _message: GetStatus) -> Status:
    """This kvd now."""
    return queries.status(parts)
