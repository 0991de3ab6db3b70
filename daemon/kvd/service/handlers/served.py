"""How requests were served: what schedulers report, and what operators and other kvds ask of it."""

from __future__ import annotations

import asyncio
import time

import msgspec

from kvd.service.errors import PeerAway
from kvd.service.handlers.senders import scheduler_of
from kvd.service.parts import Parts
from kvd.service.peers.links import Link
from kvd.service.sockets.router import Caller
from kvd.wire.lease import LeaseOpened
from kvd.wire.reply import Ok
from kvd.wire.served import GetServed, ReportServed, Served, ServedRow

PEER_SECONDS = 1.0
"""How long another kvd is given to say how its engines' requests were served."""
MOST_PEERS = 64
"""Most of them that are asked."""


def report_served(parts: Parts, caller: Caller, message: ReportServed) -> Ok:
    """A scheduler's totals. Raises `Refusal` for anyone else."""
    owner = scheduler_of(parts, caller, message.engine_id)
    parts.served.report(owner.incarnation, message, time.monotonic())
    return Ok()


def opened(parts: Parts, message: LeaseOpened) -> None:
    """Count the leases that a scheduler opens now, but for those it only says again."""
    known = parts.leases.table
    new = [x.request_id for x in message.leases if (message.engine_id, x.request_id) not in known]
    parts.served.opened(message.engine_id, new, time.monotonic())


async def get_served(parts: Parts, _caller: Caller, message: GetServed) -> Served:
    """How requests were served at our own engines, and if wanted at those of linked kvds."""
    peers = await served_by_peers(parts, message.seconds) if message.peers else ()
    return Served(rows=served(parts, message.seconds) + peers)


def peer_get_served(parts: Parts, _caller: Caller, message: GetServed) -> Served:
    """The same of our own engines, for another kvd."""
    return Served(rows=served(parts, message.seconds))


def served(parts: Parts, seconds: float) -> tuple[ServedRow, ...]:
    """How requests were served at our own engines in the last ``seconds``."""
    now = time.monotonic()
    engines = sorted(parts.registry.engines.items())
    return tuple(parts.served.row(engine.facts, seconds, now) for _, engine in engines)


async def served_by_peers(parts: Parts, seconds: float) -> tuple[ServedRow, ...]:
    """The same at engines of the kvds that there is a link to; those that do not answer are left out."""
    up = [link for link in parts.links.links.values() if link.state == "up"]
    answers = await asyncio.gather(*(_served_by(link, seconds) for link in up[:MOST_PEERS]))
    return tuple(row for rows in answers for row in rows)


async def _served_by(link: Link, seconds: float) -> tuple[ServedRow, ...]:
    try:
        answer = await link.ask(GetServed(seconds=seconds), PEER_SECONDS)
    except PeerAway:
        return ()
    rows = answer.rows if isinstance(answer, Served) else ()
    return tuple(msgspec.structs.replace(row, endpoint=link.endpoint) for row in rows)
