"""How requests were served: what schedulers report, and what operators and other kvds ask of it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from itertools import groupby

import msgspec

from kvd.service.daemon import Daemon
from kvd.service.errors import PeerAway
from kvd.service.handlers.pages import PlacedRows, page, place
from kvd.service.handlers.senders import scheduler_of
from kvd.service.handlers.sight import sight_of
from kvd.service.metrics import EngineTold
from kvd.service.peers.link import PeerLink
from kvd.service.permission import EVERYTHING, Sight
from kvd.service.sockets.router import Caller
from kvd.wire.outcomes import GetOutcomes, OutcomeRow, Outcomes, ReportOutcomes
from kvd.wire.prefixes.cache import PrefixesTaken
from kvd.wire.reply import Ok

PEER_SECONDS = 1.0
"""How long another kvd is given to say how its engines' requests were served."""
MOST_PEERS = 64
"""Most of them that are asked."""
MOST_TOLD = 256
"""Most engines of one user that are labels in metrics: four times what a host runs."""

MOST_TOLD_BYTES = 4 << 20
"""Most that the lines of one user's engines have there, roughly; 64 busy ones have half a megabyte."""
LINE_BYTES = 128
"""What a line has beside names that others choose."""

_PLACES = msgspec.json.Decoder(str)


def report_outcomes(daemon: Daemon, caller: Caller, message: ReportOutcomes) -> Ok:
    """A scheduler's totals. Raises `RequestRefused` for anyone else."""
    owner = scheduler_of(daemon, caller, message.engine_id)
    daemon.outcomes.report(owner.incarnation, message, time.monotonic(), owner.uid)
    return Ok()


async def get_outcomes(daemon: Daemon, caller: Caller, message: GetOutcomes) -> Outcomes:
    """How requests were served at our own engines, and if wanted at those of linked kvds. Raises `RequestRefused`."""
    sight = await sight_of(daemon, caller)
    rows, more = await page(daemon.slices, caller, _rows(daemon, message.seconds, message.after, sight))
    hidden = sum(not sight.of(engine.uid) for engine in daemon.registry.engines.values())
    wanted = message.peers and not message.after and sight.everything
    peers = await _rows_of_peers(daemon, message.seconds) if wanted else ()
    return Outcomes(rows=rows + peers, more=more, hidden=hidden)


async def from_peer(daemon: Daemon, caller: Caller, message: GetOutcomes) -> Outcomes:
    """The same at our own engines, for another kvd. Raises `RequestRefused`."""
    rows, more = await page(daemon.slices, caller, _rows(daemon, message.seconds, message.after, EVERYTHING))
    return Outcomes(rows=rows, more=more)


async def totals(daemon: Daemon) -> tuple[OutcomeRow, ...]:
    """All counts since kvd has known the engines, for metrics: of each user `MOST_TOLD` engines, the first ones.

    They are fewer where their lines would have more than `MOST_TOLD_BYTES`.
    """
    room = _Room()

    def rows() -> Iterator[OutcomeRow | None]:
        for engine_id in sorted(daemon.outcomes.engine_ids):
            engine, row = daemon.registry.engines.get(engine_id), None
            if engine is not None and room.left(engine.uid):
                row = daemon.outcomes.row(engine.facts, 0.0, 0.0)
                lines = 2 + 2 * len(row.totals)
                codes = 2 * sum(len(one.code) for one in row.totals)
                row = row if room.take(engine.uid, lines * (LINE_BYTES + _size(engine_id)) + codes) else None
            yield row

    return tuple(await daemon.slices.collect(rows()))


def prefixes_told(daemon: Daemon) -> tuple[tuple[str, PrefixesTaken], ...]:
    """What engines here read of others' prefix caches, for metrics, within the same bounds."""
    room = _Room()
    found: list[tuple[str, PrefixesTaken]] = []
    for engine_id, taken in groupby(sorted(daemon.prefix_counts.all_taken(), key=_engine_of), key=_engine_of):
        engine, every = daemon.registry.engines.get(engine_id), list(taken)
        lines = 4 * sum(LINE_BYTES + _size(engine_id) + _size(one.source) for _, one in every)
        if engine is not None and room.left(engine.uid) and room.take(engine.uid, lines):
            found += every
    return tuple(found)


class _Room:
    """What is left of the page of metrics for each user's engines."""

    def __init__(self) -> None:
        self._engines: Counter[int] = Counter()
        self._bytes: Counter[int] = Counter()

    def left(self, uid: int) -> bool:
        """Whether there is any."""
        return self._engines[uid] < MOST_TOLD and self._bytes[uid] < MOST_TOLD_BYTES

    def take(self, uid: int, size: int) -> bool:
        """Whether an engine whose lines have about so many bytes is told of."""
        self._engines[uid] += 1
        self._bytes[uid] += size
        return self._bytes[uid] <= MOST_TOLD_BYTES


def _engine_of(one: tuple[str, PrefixesTaken]) -> str:
    return one[0]


def _size(text: str) -> int:
    """Bytes of a text on the page; control characters are written out there."""
    return len(text.encode(errors="surrogatepass"))


def engines_told(daemon: Daemon) -> tuple[EngineTold, ...]:
    """The engines of this host that are there, for metrics: as many of each user."""
    told: Counter[int] = Counter()
    found: list[EngineTold] = []
    for engine_id, engine in sorted(daemon.registry.engines.items()):
        if engine.alive and told[engine.uid] < MOST_TOLD:
            told[engine.uid] += 1
            found.append(
                EngineTold(
                    engine_id,
                    engine.facts.role,
                    engine.compatibility_class,
                    engine_id in daemon.drains.of,
                )
            )
    return tuple(found)


def _rows(daemon: Daemon, seconds: float, after: str, sight: Sight) -> PlacedRows[str]:
    """How requests were served at our own engines in the last ``seconds``."""
    now, last = time.monotonic(), place(after, _PLACES)
    for engine_id in sorted(name for name in daemon.registry.engines if last is None or name > last):
        engine = daemon.registry.engines.get(engine_id)
        if engine is None or not sight.of(engine.uid):
            yield None
            continue
        yield engine_id, daemon.outcomes.row(engine.facts, seconds, now)


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
