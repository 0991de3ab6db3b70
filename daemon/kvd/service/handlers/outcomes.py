"""How requests were served: what schedulers report, and what operators and other kvds ask of it."""

from __future__ import annotations

import asyncio
import time

import msgspec

from kvd.service.daemon import Daemon
from kvd.service.errors import PeerAway
from kvd.service.handlers.senders import scheduler_of
from kvd.service.peers.links import PeerLink
from kvd.service.sockets.router import Caller
from kvd.wire.outcomes import GetOutcomes, OutcomeRow, Outcomes, ReportOutcomes
from kvd.wire.reply import Ok

PEER_SECONDS = 1.0
"""How long another kvd is given to say how its engines' requests were served."""
MOST_PEERS = 64
"""Most of them that are asked."""


def report_outcomes(daemon: Daemon, caller: Caller, message: ReportOutcomes) -> Ok:
    """A scheduler's totals. Raises `RequestRefused` for anyone else."""
    owner = scheduler_of(daemon, caller, message.engine_id)
    daemon.outcomes.report(owner.incarnation, message, time.monotonic())
    return Ok()


async def get_outcomes(daemon: Daemon, _caller: Caller, message: GetOutcomes) -> Outcomes:
    """How requests were served at our own engines, and if wanted at those of linked kvds."""
    peers = await _rows_of_peers(daemon, message.seconds) if message.peers else ()
    return Outcomes(rows=rows(daemon, message.seconds) + peers)


def rows(daemon: Daemon, seconds: float) -> tuple[OutcomeRow, ...]:
    """How requests were served at our own engines in the last ``seconds``."""
    now = time.monotonic()
    engines = sorted(daemon.registry.engines.items())
    return tuple(daemon.outcomes.row(engine.facts, seconds, now) for _, engine in engines)


async def _rows_of_peers(daemon: Daemon, seconds: float) -> tuple[OutcomeRow, ...]:
    """The same at engines of the kvds that there is a link to; those that do not answer are left out."""
    up = [link for link in daemon.links.links.values() if link.state == "up"]
    answers = await asyncio.gather(*(_rows_of(link, seconds) for link in up[:MOST_PEERS]))
    return tuple(row for rows in answers for row in rows)


async def _rows_of(link: PeerLink, seconds: float) -> tuple[OutcomeRow, ...]:
    try:
        answer = await link.ask(GetOutcomes(seconds=seconds), PEER_SECONDS)
    except PeerAway:
        return ()
    rows = answer.rows if isinstance(answer, Outcomes) else ()
    return tuple(msgspec.structs.replace(row, endpoint=link.endpoint) for row in rows)
