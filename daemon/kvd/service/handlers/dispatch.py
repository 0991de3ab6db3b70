"""Dispatch: which message is answered by which function, on the local socket and on the peer socket."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any

from kvd.geometry.codec import shape_of
from kvd.geometry.errors import GeometryError
from kvd.geometry.rank import Rank
from kvd.service.daemon import Daemon
from kvd.service.engines.registry import Client, LocalEngine
from kvd.service.errors import RequestRefused
from kvd.service.handlers import checksums, orders, outcomes, pushes, queries, reports
from kvd.service.handlers.senders import scheduler_of
from kvd.service.peers.forwarding import ask_peer, is_ours, passed_on
from kvd.service.sockets.router import Caller, Handler
from kvd.wire.checksum import GetSums
from kvd.wire.frame import Message
from kvd.wire.handshake import DescribeEngine, EngineDescribed, GetPeer, Ping, Pong
from kvd.wire.identity import DIGEST_KEY_BYTES, EngineFacts, LeaseKey
from kvd.wire.lease import LeaseClaim, LeaseClaimed, LeaseClosed, LeaseOpened, LeaseRelease
from kvd.wire.order import ClearForced, ForceMiss, GetForced, ReportForced
from kvd.wire.outcomes import GetOutcomes, ReportOutcomes
from kvd.wire.push import PushAnnounce, PushDone, PushProgress, PushWithdraw
from kvd.wire.query import EngineList, GetStatus, KvdStatus, ListEngines, ListWorkers, WorkerList
from kvd.wire.registration import (
    Heartbeat,
    NotRegistered,
    Registered,
    RegisterScheduler,
    RegisterWorker,
    Unregister,
)
from kvd.wire.reply import Ok
from kvd.wire.transfer import (
    GetKeptEngine,
    ListTransfers,
    ReportTransfers,
)

MAX_NAME = 512
"""Longest engine id or incarnation, in characters."""
PUSHES: tuple[type[Any], ...] = (PushAnnounce, PushWithdraw, PushProgress, PushDone)


def local_handlers(daemon: Daemon) -> Mapping[type[Any], Handler]:
    """What workers, schedulers and operators may send."""
    return {
        RegisterWorker: partial(register_worker, daemon),
        RegisterScheduler: partial(register_scheduler, daemon),
        Heartbeat: partial(heartbeat, daemon),
        Unregister: partial(unregister, daemon),
        GetPeer: partial(get_peer, daemon),
        LeaseOpened: partial(lease_opened, daemon),
        LeaseClosed: partial(lease_closed, daemon),
        LeaseClaim: partial(lease_claim, daemon),
        LeaseRelease: partial(lease_release, daemon),
        **dict.fromkeys(PUSHES, partial(pushes.from_worker, daemon)),
        GetSums: partial(checksums.from_worker, daemon),
        ForceMiss: partial(orders.force_miss, daemon),
        ClearForced: partial(orders.clear_forced, daemon),
        ReportForced: partial(orders.report_forced, daemon),
        GetForced: partial(orders.get_forced, daemon),
        ReportTransfers: partial(reports.report_transfers, daemon),
        ListTransfers: partial(reports.list_transfers, daemon),
        GetKeptEngine: partial(reports.get_kept_engine, daemon),
        ListEngines: partial(list_engines, daemon),
        ListWorkers: partial(list_workers, daemon),
        GetStatus: partial(get_status, daemon),
        ReportOutcomes: partial(outcomes.report_outcomes, daemon),
        GetOutcomes: partial(outcomes.get_outcomes, daemon),
    }


def peer_handlers(daemon: Daemon) -> Mapping[type[Any], Handler]:
    """What other kvds may send. Nothing is ever passed on from here: what it is about is ours, or it is nobody's."""
    return {
        DescribeEngine: partial(describe_engine, daemon),
        Ping: partial(ping, daemon),
        LeaseClaim: partial(peer_lease_claim, daemon),
        LeaseRelease: partial(peer_lease_release, daemon),
        **dict.fromkeys(PUSHES, partial(pushes.from_peer, daemon)),
        GetSums: partial(checksums.from_peer, daemon),
        ListEngines: partial(peer_list_engines, daemon),
        GetOutcomes: partial(outcomes.peer_get_outcomes, daemon),
    }


# --- registration ---


def register_worker(daemon: Daemon, caller: Caller, message: RegisterWorker) -> Registered:
    """Check the card and take the worker. Raises `RequestRefused`."""
    card = message.card
    _check_identity(card.engine, card.incarnation, card.rank)
    try:
        geometry = daemon.decode(card.geometry)
    except GeometryError as error:
        raise RequestRefused(
            getattr(error, "code", "KVD-GEOMETRY"),
            f"the geometry of {card.engine.engine_id}/{card.rank} cannot be used: {error}",
            hint="worker and kvd should be of one version",
        ) from None
    if geometry.rank != card.rank:
        raise RequestRefused(
            "KVD-BAD-CARD", f"the card says rank {card.rank}, its geometry says {geometry.rank}"
        )
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
    return _take(daemon, caller, client)


def register_scheduler(daemon: Daemon, caller: Caller, message: RegisterScheduler) -> Registered:
    """Take the scheduler and the leases it holds. Raises `RequestRefused`."""
    _check_identity(message.engine, message.incarnation, None)
    if len(message.digest_key) not in (0, DIGEST_KEY_BYTES):
        raise RequestRefused(
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
    registered = _take(daemon, caller, client)
    daemon.leases.present(client, message.leases)
    daemon.readers.presents(client, message.readers)
    return registered


def heartbeat(daemon: Daemon, caller: Caller, message: Heartbeat) -> Registered | NotRegistered:
    """A sign of life."""
    client = daemon.registry.heard(message.incarnation, caller.route)
    if client is None:
        return NotRegistered(kvd_generation=daemon.myself.generation)
    return registered_as(daemon, daemon.registry.engines[client.engine.engine_id])


def unregister(daemon: Daemon, _caller: Caller, message: Unregister) -> Ok:
    """An orderly goodbye; one that is not known has said it already."""
    if client := daemon.registry.clients.get(message.incarnation):
        daemon.registry.end(client, "it said goodbye", ended=True)
    return Ok()


def registered_as(daemon: Daemon, engine: LocalEngine) -> Registered:
    """What a client of ``engine`` is told of itself."""
    return Registered(
        kvd_generation=daemon.myself.generation,
        engine_generation=engine.generation,
        host=daemon.myself.endpoint.host,
        port=daemon.myself.endpoint.port,
        heartbeat_seconds=daemon.config.liveness.heartbeat_seconds,
    )


def _take(daemon: Daemon, caller: Caller, client: Client) -> Registered:
    engine = daemon.registry.register(client)
    daemon.liveness.watch(client, caller.pid)
    return registered_as(daemon, engine)


def _check_identity(engine: EngineFacts, incarnation: str, rank: Rank | None) -> None:
    for what, text in (("engine_id", engine.engine_id), ("incarnation", incarnation)):
        if not text or len(text) > MAX_NAME:
            raise RequestRefused(
                "KVD-BAD-CARD", f"{what} has {len(text)} characters, wanted are 1 to {MAX_NAME}"
            )
    for what in ("tp", "pp", "dcp", "world_size"):
        size = getattr(engine, what)
        place = getattr(rank, what, 0)
        if size < 1 or not 0 <= place < size:
            raise RequestRefused(
                "KVD-BAD-CARD",
                f"engine {engine.engine_id!r} has {what} {size}, and this worker is {what} rank {place}",
                hint=f"wanted is a rank from 0 to {what} - 1",
            )


# --- handshake ---


def get_peer(daemon: Daemon, caller: Caller, message: GetPeer) -> Message | Awaitable[Message]:
    """The handshake for a local engine; at once where the peer is known. Raises `RequestRefused`."""
    if daemon.draining:
        raise RequestRefused("KVD-DRAINING", "this kvd is stopping", hint="ask again when it is back")
    return daemon.handshakes.known(message, caller.route) or daemon.handshakes.get(message, caller.route)


async def describe_engine(daemon: Daemon, caller: Caller, message: DescribeEngine) -> EngineDescribed:
    """The card of an engine of ours, for another kvd, which is told when it ends. Raises `RequestRefused`."""
    wait = daemon.registry.wait_up if message.keyed else daemon.registry.wait_ready
    engine = await wait(
        message.engine_id, daemon.config.peer.handshake_seconds / 2, settling=daemon.handshakes.settling
    )
    daemon.subscribers.described(caller.route, message.kvd_id, engine)
    return EngineDescribed(card=engine.card(), kvd_generation=daemon.myself.generation, shape=engine.shape)


def ping(daemon: Daemon, caller: Caller, message: Ping) -> Pong:
    """Here; which of the engines in use are gone, and which there are."""
    gone = daemon.subscribers.pinged(
        caller.route, message, daemon.registry, settling=daemon.handshakes.settling
    )
    ready = tuple((e.facts.engine_id, e.generation) for e in daemon.registry.engines.values() if e.up)
    return Pong(kvd_id=daemon.myself.kvd_id, kvd_generation=daemon.myself.generation, gone=gone, ready=ready)


# --- leases ---


def lease_opened(daemon: Daemon, caller: Caller, message: LeaseOpened) -> Ok:
    """A scheduler keeps blocks. Raises `RequestRefused` for anyone else."""
    owner = scheduler_of(daemon, caller, message.engine_id)
    outcomes.count_opened(daemon, message)
    daemon.leases.open(owner, message.leases)
    return Ok()


def lease_closed(daemon: Daemon, caller: Caller, message: LeaseClosed) -> Ok:
    """A scheduler freed blocks. Raises `RequestRefused` for anyone else."""
    scheduler_of(daemon, caller, message.engine_id)
    daemon.leases.closed(message)
    return Ok()


async def lease_claim(daemon: Daemon, caller: Caller, message: LeaseClaim) -> LeaseClaimed:
    """A decoder's claim, answered here or by the prefiller's kvd. Raises `RequestRefused`."""
    settings = daemon.config.leases
    daemon.readers.claims(daemon.registry.behind(caller.route), message, settings.max_seconds)
    answer: Message
    if is_ours(daemon, message.key.endpoint):
        answer = await peer_lease_claim(daemon, caller, message)
    else:
        answer = await _ask_owner(daemon, message.key, message, settings.confirm_seconds + 1.0)
    if not isinstance(answer, LeaseClaimed):
        raise passed_on(answer, message.key.endpoint)
    daemon.readers.promised(message.reader, answer.seconds)
    return answer


async def lease_release(daemon: Daemon, _caller: Caller, message: LeaseRelease) -> Ok:
    """A decoder's release, taken here or by the prefiller's kvd. Raises `RequestRefused` where it was not delivered."""
    answer = await release(daemon, message)
    daemon.readers.released(message.reader)
    return answer


async def release(daemon: Daemon, message: LeaseRelease) -> Ok:
    """Bring a release to the kvd that has the lease. Raises `RequestRefused` where it could not be delivered."""
    if is_ours(daemon, message.key.endpoint):
        daemon.outcomes.claimed(message.key.engine_id, message.key.request_id)
        daemon.leases.release(message)
        return Ok()
    answer = await _ask_owner(daemon, message.key, message, daemon.config.peer.handshake_seconds)
    if not isinstance(answer, Ok):
        raise passed_on(answer, message.key.endpoint)
    return answer


async def peer_lease_claim(daemon: Daemon, _caller: Caller, message: LeaseClaim) -> LeaseClaimed:
    """A claim on one of our own engines' leases, which another kvd may have passed on."""
    daemon.outcomes.claimed(message.key.engine_id, message.key.request_id)
    return await daemon.leases.claim(message)


def peer_lease_release(daemon: Daemon, _caller: Caller, message: LeaseRelease) -> Ok:
    """A release of one of our own engines' leases, which another kvd may have passed on."""
    daemon.outcomes.claimed(message.key.engine_id, message.key.request_id)
    daemon.leases.release(message)
    return Ok()


async def _ask_owner(daemon: Daemon, key: LeaseKey, message: Message, seconds: float) -> Message:
    what = f"lease {key.request_id!r} of engine {key.engine_id!r}"
    return await ask_peer(daemon, key.endpoint, what, message, seconds)


# --- queries ---


def list_engines(daemon: Daemon, _caller: Caller, message: ListEngines) -> EngineList:
    """Local engines and known peers."""
    return queries.engines(daemon, message)


def peer_list_engines(daemon: Daemon, _caller: Caller, message: ListEngines) -> EngineList:
    """Our own engines, for another kvd."""
    return queries.engines(daemon, message, local_only=True)


def list_workers(daemon: Daemon, _caller: Caller, _message: ListWorkers) -> WorkerList:
    """Local workers and schedulers."""
    return queries.workers(daemon)


def get_status(daemon: Daemon, _caller: Caller, _message: GetStatus) -> KvdStatus:
    """This kvd now."""
    return queries.status(daemon)
