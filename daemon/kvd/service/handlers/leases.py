"""Leases: what their owners say of them, and readers' claims and releases, from here or from another kvd."""

from __future__ import annotations

from kvd.service.daemon import Daemon
from kvd.service.handlers.forwarding import Answer, ask_peer, is_ours
from kvd.service.handlers.senders import scheduler_of
from kvd.service.sockets.router import Caller
from kvd.wire.lease import LeaseClaim, LeaseClaimed, LeaseClosed, LeaseOpened, LeaseRelease
from kvd.wire.reply import Ok


def lease_opened(daemon: Daemon, caller: Caller, message: LeaseOpened) -> Ok:
    """A scheduler keeps blocks. Raises `RequestRefused` for anyone else."""
    owner = scheduler_of(daemon, caller, message.engine_id)
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
    if is_ours(daemon, message.key.endpoint):
        answer = await daemon.leases.claim(message)
    else:
        answer = await _ask_owner(daemon, message, LeaseClaimed, settings.confirm_seconds + 1.0)
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
        return peer_lease_release(daemon, None, message)
    return await _ask_owner(daemon, message, Ok, daemon.config.peer.handshake_seconds)


def peer_lease_release(daemon: Daemon, _caller: Caller | None, message: LeaseRelease) -> Ok:
    """A release of one of our own engines' leases, which another kvd may have passed on."""
    daemon.leases.release(message)
    return Ok()


async def _ask_owner(
    daemon: Daemon, message: LeaseClaim | LeaseRelease, kind: type[Answer], seconds: float
) -> Answer:
    key = message.key
    what = f"lease {key.request_id!r} of engine {key.engine_id!r}"
    return await ask_peer(daemon, key.endpoint, what, message, kind, seconds)
