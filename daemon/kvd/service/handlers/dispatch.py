"""Dispatch: which message is answered by which function, on the local socket and on the peer socket."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any

from kvd.geometry.codec import shape_of
from kvd.geometry.errors import GeometryError
from kvd.geometry.rank import Rank
from kvd.service.engines.registry import Client, Engine
from kvd.service.errors import Refusal
from kvd.service.handlers import checksums, orders, pushes, queries, reports
from kvd.service.handlers import served as serving
from kvd.service.handlers.senders import scheduler_of
from kvd.service.parts import Parts
from kvd.service.peers.forwarding import ask_peer, is_ours, passed_on
from kvd.service.sockets.router import Caller, Handler
from kvd.wire.checksum import GetSums
from kvd.wire.frame import Message
from kvd.wire.handshake import DescribeEngine, EngineDescribed, GetPeer, Ping, Pong
from kvd.wire.identity import DIGEST_KEY_BYTES, EngineFacts, LeaseKey
from kvd.wire.lease import LeaseClaim, LeaseClaimed, LeaseClosed, LeaseOpened, LeaseRelease
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
    ListTransfers,
    ReportTransfers,
)

MAX_NAME = 512
"""Longest engine id or incarnation, in characters."""
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
        ReportTransfers: partial(reports.report_transfers, parts),
        ListTransfers: partial(reports.list_transfers, parts),
        GetKeptEngine: partial(reports.get_kept_engine, parts),
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
            f"the geometry of {card.engine.engine_id}/{card.rank} cannot be used: {error}",
            hint="worker and kvd should be of one version",
        ) from None
    if geometry.rank != card.rank:
        raise Refusal("KVD-BAD-CARD", f"the card says rank {card.rank}, its geometry says {geometry.rank}")
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
    if len(message.digest_key) not in (0, DIGEST_KEY_BYTES):
        raise Refusal(
            "KVD-BAD-CARD",
            f"digest_key has {len(message.digest_key)} bytes, wanted are {DIGEST_KEY_BYTES} or none",
            hint="scheduler and kvd should be of one version",
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


def _check_identity(engine: EngineFacts, incarnation: str, rank: Rank | None) -> None:
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
    owner = scheduler_of(parts, caller, message.engine_id)
    serving.opened(parts, message)
    parts.leases.open(owner, message.leases)
    return Ok()


def lease_closed(parts: Parts, caller: Caller, message: LeaseClosed) -> Ok:
    """A scheduler freed blocks. Raises `Refusal` for anyone else."""
    scheduler_of(parts, caller, message.engine_id)
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
