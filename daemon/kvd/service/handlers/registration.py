"""Registration: workers and schedulers say who they are, that they live, and that they end."""

from __future__ import annotations

import msgspec

from kvd.geometry.errors import GeometryError
from kvd.geometry.packing import unpack
from kvd.geometry.rank import Rank
from kvd.service.daemon import Daemon
from kvd.service.engines.local_engine import Client, LocalEngine
from kvd.service.errors import RequestRefused
from kvd.service.handlers import drains
from kvd.service.handlers.senders import client_of
from kvd.service.sockets.router import Caller
from kvd.shown import escaped, has_controls
from kvd.wire.card_parts import facts_bytes, text_bytes
from kvd.wire.codes import OthersCode
from kvd.wire.identity import DIGEST_KEY_BYTES, HERE, Endpoint, EngineFacts, WorkerCard
from kvd.wire.limits import LONGEST_ID
from kvd.wire.locality import Locality
from kvd.wire.registration import (
    Heartbeat,
    NotRegistered,
    Registered,
    RegisterScheduler,
    RegisterWorker,
    Unregister,
)
from kvd.wire.reply import Ok


def register_worker(daemon: Daemon, caller: Caller, message: RegisterWorker) -> Registered:
    """Check the card and take the worker. Raises `RequestRefused`."""
    card = message.card
    client = Client(
        kind="worker",
        engine=card.engine,
        incarnation=card.incarnation,
        pid=caller.pid or card.pid,
        route=caller.route,
        uid=caller.uid,
        process=caller.pid,
        rank=card.rank,
        card=card,
        parts=message.parts,
        outlines=message.outlines,
        size=card_size(card, message.locality),
        home=_home(daemon, message.home),
        locality=message.locality,
    )
    return registered_as(daemon, take_worker(daemon, client, card, packed=message.packed))


def take_worker(daemon: Daemon, client: Client, card: WorkerCard, *, packed: bool = False) -> LocalEngine:
    """Check a worker's card and take the worker, of this host or another one. Raises `RequestRefused`."""
    _check_identity(card.engine, card.incarnation, card.rank)
    daemon.registry.check(client)  # whose it is and how large, before anything is read
    try:
        if packed:
            card = client.card = msgspec.structs.replace(card, geometry=unpack(card.geometry))
            client.size = card_size(card, client.locality)
            daemon.registry.check(client)
        found = daemon.geometries.check(card.geometry)
    except GeometryError as error:
        raise RequestRefused(
            OthersCode(error.code),
            f"the geometry of {card.engine.engine_id}/{card.rank} cannot be used: {error}",
            hint="worker and kvd should be of one version",
        ) from None
    if found.rank != card.rank:
        raise RequestRefused(
            "KVD-BAD-CARD", f"the card says rank {card.rank}, its geometry says {found.rank}"
        )
    client.shape, client.content, client.regions = found.shape, found.content, len(found.regions)
    client.registered_bytes = sum(region.length for region in found.regions)
    return _take(daemon, client)


def register_scheduler(daemon: Daemon, caller: Caller, message: RegisterScheduler) -> Registered:
    """Take the scheduler and the leases it holds. Raises `RequestRefused`."""
    _check_identity(message.engine, message.incarnation, None)
    if len(message.digest_key) not in (0, DIGEST_KEY_BYTES):
        raise RequestRefused(
            "KVD-BAD-CARD",
            f"digest_key has {len(message.digest_key)} bytes, wanted are {DIGEST_KEY_BYTES} or none",
            hint="scheduler and kvd should be of one version",
        )
    home = _home(daemon, message.home)
    if home not in (None, HERE):
        raise RequestRefused(
            "KVD-ENGINE-CONFLICT",
            f"the scheduler of engine {message.engine.engine_id!r} names the kvd at {home} as its own, and registers"
            f" with the one at {daemon.myself.endpoint}",
            hint="let `home` of the engine's connectors be the kvd of the host that its scheduler is on",
        )
    client = Client(
        kind="scheduler",
        engine=message.engine,
        incarnation=message.incarnation,
        pid=caller.pid or message.pid,
        route=caller.route,
        uid=caller.uid,
        process=caller.pid,
        policy=message.policy,
        size=facts_bytes(message.engine) + text_bytes((message.incarnation, message.policy)),
        digest_key=message.digest_key,
        home=home,
    )
    again = message.incarnation in daemon.registry.clients
    registered = registered_as(daemon, _take(daemon, client))
    drains.registered(daemon, client, message.draining, again=again)
    daemon.leases.present(client, message.leases, complete=message.complete)
    daemon.readers.presents(client, message.readers)
    return registered


def heartbeat(daemon: Daemon, caller: Caller, message: Heartbeat) -> Registered | NotRegistered:
    """A sign of life. Raises `RequestRefused` for that of somebody else."""
    client_of(daemon, caller, message.incarnation, "give a sign of life for")
    client = daemon.registry.sign_of_life(message.incarnation, caller.route)
    if client is None:
        return NotRegistered(kvd_generation=daemon.myself.generation)
    return registered_as(daemon, daemon.registry.engines[client.engine.engine_id])


def unregister(daemon: Daemon, caller: Caller, message: Unregister) -> Ok:
    """An orderly goodbye; one that is not known has said it already. Raises `RequestRefused` for somebody else's."""
    if client := client_of(daemon, caller, message.incarnation, "unregister"):
        daemon.registry.end(client, "it said goodbye", ended=True)
    return Ok()


def registered_as(daemon: Daemon, engine: LocalEngine) -> Registered:
    """What a client of ``engine`` is told of itself."""
    return Registered(
        kvd_generation=daemon.myself.generation,
        engine_generation=engine.generation,
        compatibility_class=engine.compatibility_class,
        host=daemon.myself.endpoint.host,
        port=daemon.myself.endpoint.port,
        heartbeat_seconds=daemon.config.liveness.heartbeat_seconds,
    )


def card_size(card: WorkerCard, stands: Locality | None = None) -> int:
    """About what a worker's card takes, and what it told of where it stands, in bytes."""
    texts = [card.incarnation, card.host, card.backend]
    if stands is not None:
        devices = (*stands.adapters, *filter(None, (stands.gpu,)))
        texts += [stands.cpus, *(text for device in devices for text in (device.name, device.path))]
    return len(card.geometry) + len(card.metadata) + text_bytes(texts) + facts_bytes(card.engine)


def _home(daemon: Daemon, named: Endpoint | None) -> Endpoint | None:
    """The home that a client names, as this kvd knows it. Raises `RequestRefused`."""
    mine = daemon.myself.endpoint
    if named is None or named in (HERE, mine):
        return None if named is None else HERE
    home = Endpoint(named.host, named.port or mine.port)
    if home == mine:
        return HERE
    if not mine.port:
        raise RequestRefused(
            "KVD-NO-WAY-BACK",
            f"an engine on several hosts has its scheduler at the kvd at {home}, and this kvd has no peer socket",
            hint="set peer.listen in the configuration of this kvd",
        )
    return home


def _take(daemon: Daemon, client: Client) -> LocalEngine:
    engine = daemon.registry.register(client)
    daemon.liveness.watch(client)
    if client.elsewhere is not None:
        daemon.homes.registered(client, client.elsewhere)
    return engine


def _check_identity(engine: EngineFacts, incarnation: str, rank: Rank | None) -> None:
    for what, text in (("engine_id", engine.engine_id), ("incarnation", incarnation)):
        if not text or len(text) > LONGEST_ID:
            raise RequestRefused(
                "KVD-BAD-CARD", f"{what} has {len(text)} characters, wanted are 1 to {LONGEST_ID}"
            )
        if has_controls(text):
            raise RequestRefused(
                "KVD-BAD-CARD",
                f"{what} '{escaped(text)}' has control characters, which terminals and logs would obey",
                hint="give the engine an id of letters, digits, dots and dashes",
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
