"""Leases: what their owners say of them, and readers' claims and releases, from here or from another kvd."""

from __future__ import annotations

import msgspec

from kvd.service.daemon import Daemon
from kvd.service.engines.local_engine import Client
from kvd.service.errors import RequestRefused
from kvd.service.handlers.forwarding import Answer, ask_peer, is_ours, tell_workers
from kvd.service.handlers.hosts import claimant_of, local_claimant
from kvd.service.handlers.senders import scheduler_of
from kvd.service.sockets.router import Caller
from kvd.wire.frame import kind_of
from kvd.wire.handshake import GetPeer
from kvd.wire.identity import HERE
from kvd.wire.lease import (
    LeaseClaim,
    LeaseClaimed,
    LeaseClosed,
    LeaseConfirmed,
    LeaseOpened,
    LeaseRelease,
)
from kvd.wire.reply import Ok


def lease_opened(daemon: Daemon, caller: Caller, message: LeaseOpened) -> Ok:
    """A scheduler keeps blocks. Raises `RequestRefused` for anyone else."""
    owner = scheduler_of(daemon, caller, message.engine_id)
    opened = daemon.leases.open_held if message.held else daemon.leases.open
    opened(owner, message.leases)
    return Ok()


def lease_closed(daemon: Daemon, caller: Caller, message: LeaseClosed) -> Ok:
    """A scheduler freed blocks. Raises `RequestRefused` for anyone else."""
    scheduler_of(daemon, caller, message.engine_id)
    daemon.leases.closed(message)
    return Ok()


async def lease_claim(daemon: Daemon, caller: Caller, message: LeaseClaim) -> LeaseClaimed:
    """A decoder's claim, answered here or by the prefiller's kvd. Raises `RequestRefused`."""
    settings = daemon.config.leases
    client = _decoder(daemon, caller, message)
    _refuse_new(daemon, client, message)
    daemon.readers.claims(client, message, settings.max_seconds)
    if is_ours(daemon, message.key.endpoint):
        answer = await daemon.leases.claim(message, local_claimant(daemon, client, message.key.engine_id))
    else:
        answer = await _ask_owner(daemon, message, LeaseClaimed, settings.confirm_seconds + 1.0)
    daemon.readers.promised(message.reader, answer.seconds)
    current = answer.seconds > 0 and _is_current(daemon, caller, client, message)
    if current and not message.alone:
        told = LeaseConfirmed(reader=message.reader, seconds=answer.seconds)
        tell_workers(daemon, client.engine.engine_id, told)
    # Whatever another kvd says of generations: this one knows which it has given to its engines.
    return msgspec.structs.replace(answer, generation=message.generation if current else "")


async def lease_release(daemon: Daemon, caller: Caller, message: LeaseRelease) -> Ok:
    """A decoder's release, taken here or by the prefiller's kvd. Raises `RequestRefused` where it was not delivered."""
    client = _decoder(daemon, caller, message)
    daemon.readers.may_release(client, message)
    answer = await release(daemon, message, client)
    daemon.readers.released(message.reader)
    return answer


async def release(daemon: Daemon, message: LeaseRelease, client: Client) -> Ok:
    """Bring a local client's release to the kvd that has the lease.

    Raises `RequestRefused` where it could not be delivered.
    """
    if is_ours(daemon, message.key.endpoint):
        daemon.leases.release(message, local_claimant(daemon, client, message.key.engine_id))
        return Ok()
    return await _ask_owner(daemon, message, Ok, daemon.config.peer.handshake_seconds)


async def peer_lease_claim(daemon: Daemon, caller: Caller, message: LeaseClaim) -> LeaseClaimed:
    """A claim on a lease of one of our own engines, by a decoder of the caller's host. Raises `RequestRefused`."""
    return await daemon.leases.claim(message, claimant_of(daemon, caller, message.key.engine_id))


def peer_lease_release(daemon: Daemon, caller: Caller, message: LeaseRelease) -> Ok:
    """A release of one of our own engines' leases, by a decoder of the caller's host."""
    daemon.leases.release(message, claimant_of(daemon, caller, message.key.engine_id))
    return Ok()


def _refuse_new(daemon: Daemon, client: Client, claim: LeaseClaim) -> None:
    """Raise `RequestRefused` where the reader's engine is to claim nothing new.

    Not under policy fail: the request would fail. Its scheduler knows, and claims for what comes to it all the same.
    """
    engine_id = client.engine.engine_id
    if claim.reader in daemon.readers.remembered or client.policy == "fail":
        return
    if daemon.drains.refuses(engine_id):
        raise RequestRefused(
            "KVD-ENGINE-DRAINING",
            f"engine {engine_id!r} is draining, and claims nothing new",
            hint="`kvctl drain --undo` has it take requests again",
            final=True,
        )


def _is_current(daemon: Daemon, caller: Caller, client: Client, claim: LeaseClaim) -> bool:
    """Whether the prefiller is of the generation that a claim names, and known to the reader's engine.

    A lease is of a name alone: the engine may have restarted, and have given that name again. Whoever was not given the
    prefiller is not told of its end, and has to ask for it.
    """
    key = claim.key
    if not claim.generation:
        return False
    reader = client.engine.engine_id
    if is_ours(daemon, key.endpoint):
        owner, engine = daemon.registry.ready(key.engine_id), daemon.registry.ready(reader)
        if owner is None or engine is None or owner.generation != claim.generation:
            return False
        users = daemon.handshakes.users(HERE, key.engine_id, claim.generation)
        return users.get(reader) == engine.generation
    question = GetPeer(
        local_engine=reader,
        engine_id=key.engine_id,
        endpoint=key.endpoint,
        generation=claim.generation,
        keyed=True,
    )
    return daemon.handshakes.known(question, caller.route) is not None


def _decoder(daemon: Daemon, caller: Caller, message: LeaseClaim | LeaseRelease) -> Client:
    """The local client that reads. One that is gone counts: it may have sent this before its end.

    Raises `RequestRefused` for whoever is no engine's: nobody would know when it is gone.
    """
    client = daemon.registry.behind(caller.route)
    if client is None:
        raise RequestRefused(
            "KVD-NOT-REGISTERED",
            f"the sender of a {kind_of(message)} is not registered here: engines read under leases, nobody else",
            hint="register, then send it again",
        )
    return client


async def _ask_owner(
    daemon: Daemon, message: LeaseClaim | LeaseRelease, kind: type[Answer], seconds: float
) -> Answer:
    key = message.key
    what = f"lease {key.request_id!r} of engine {key.engine_id!r}"
    return await ask_peer(daemon, key.endpoint, what, message, kind, seconds)
