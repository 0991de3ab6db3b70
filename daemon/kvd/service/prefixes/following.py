"""Follows what other kvds tell of their engines: one question to each waits there until something is new.

A kvd is followed from the first question for a prefix that its engines might hold, until none of them is of use here.
An earlier kvd refuses, and its engines are asked as if nothing could be known of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from kvd.service.background_tasks import BackgroundTasks
from kvd.service.errors import PeerAway
from kvd.service.peers.links import PeerLinks
from kvd.service.peers.peer_engine import PeerEngine
from kvd.service.peers.peer_store import PeerStore
from kvd.service.prefixes.hints import Hints
from kvd.service.slices import paced
from kvd.wire.identity import Endpoint
from kvd.wire.prefix import SCHEME_FACT
from kvd.wire.prefixes.hints import (
    MOST_HINTED,
    WAIT_SECONDS,
    EngineHints,
    GetHints,
    HintsTold,
    KnownHints,
)

LEAST_PAUSE = 0.1
RESTS = 10
"""Times as long as an answer took to be taken nothing more is asked there, whatever that kvd tells."""
MOST_ANSWERS = 100.0
"""Answers a second that this kvd wants, of all others together: of 256 hosts each is asked every 2.5 s."""
HOP_SECONDS = 2.0
"""What an answer may take beside the waiting for something new."""
UNKEPT_SECONDS = 60.0
"""After so long all is asked for again of an engine whose hints there was no room for."""


class _Unkept(NamedTuple):
    """What an engine told last, of which nothing is kept, and until when (time.monotonic()) no more of it is wanted."""

    known: KnownHints
    until: float


class Followers:
    """Whom this kvd follows."""

    def __init__(self, links: PeerLinks, hints: Hints, peers: PeerStore, counters: Counter[str]) -> None:
        self._links, self._hints, self._peers, self._counters = links, hints, peers, counters
        self._followed: set[Endpoint] = set()
        self._silent: dict[Endpoint, str] = {}
        """Kvds that refused, with their generation then."""
        self._tasks = BackgroundTasks()

    def __len__(self) -> int:
        return len(self._followed)

    def follow(self, endpoint: Endpoint) -> None:
        """Learn what that kvd's engines hold, from now on."""
        if endpoint in self._followed or self._silent.get(endpoint) == self._generation(endpoint):
            return
        self._silent.pop(endpoint, None)
        self._followed.add(endpoint)
        self._tasks.begin(self._follow(endpoint))

    async def close(self) -> None:
        """Follow nobody any more."""
        await self._tasks.close()

    def _generation(self, endpoint: Endpoint) -> str:
        link = self._links.links.get(endpoint)
        return link.generation if link is not None else ""

    async def _follow(self, endpoint: Endpoint) -> None:
        """Until the link is lost: what is known is not to outlive it."""
        unkept: dict[str, _Unkept] = {}
        try:
            while wanted := _of_use(self._peers.at(endpoint)):
                self._hints.drop_all_at(endpoint, but=wanted)
                pause = max(LEAST_PAUSE, len(self._followed) / MOST_ANSWERS)
                question = GetHints(known=self._known(endpoint, wanted, unkept), after=pause)
                asked = time.monotonic()
                answer = await self._links.get(endpoint).ask(question, pause + WAIT_SECONDS + HOP_SECONDS)
                self._counters["prefixes.hint_answers"] += 1
                if not isinstance(answer, HintsTold):
                    self._silent[endpoint] = self._generation(endpoint)
                    return
                spent = await self._take(endpoint, answer, wanted, unkept)
                # An honest kvd has waited for so long itself.
                await asyncio.sleep(max(asked + pause - time.monotonic(), RESTS * spent))
        except PeerAway:
            pass  # the next question for a prefix begins anew
        finally:
            self._followed.discard(endpoint)
            self._hints.drop_all_at(endpoint)

    async def _take(
        self,
        endpoint: Endpoint,
        answer: HintsTold,
        wanted: Mapping[str, str],
        unkept: dict[str, _Unkept],
    ) -> float:
        """Take what was told of the engines that are wanted, each once. Gives the seconds that this took."""
        left, spent = dict(wanted), 0.0
        async for one in paced(answer.engines):
            if left.get(one.engine_id) == one.generation:
                del left[one.engine_id]
                began = time.monotonic()
                self._keep(endpoint, one, unkept)
                spent += time.monotonic() - began
        return spent

    def _keep(self, endpoint: Endpoint, told: EngineHints, unkept: dict[str, _Unkept]) -> None:
        """Keep what is told, if there is room. Else it counts as known for a while: all of it would come each time."""
        key, change = (endpoint, told.engine_id), told.change
        before = unkept.pop(told.engine_id, None)
        if change.since and before is not None:
            until = before.until
        elif self._hints.take(key, told.generation, change) and self._hints.get(key, told.generation) is None:
            until = time.monotonic() + UNKEPT_SECONDS
        else:
            return
        known = KnownHints(engine_id=told.engine_id, generation=told.generation, version=change.version)
        unkept[told.engine_id] = _Unkept(known, until)

    def _known(
        self, endpoint: Endpoint, wanted: Mapping[str, str], unkept: Mapping[str, _Unkept]
    ) -> tuple[KnownHints, ...]:
        known, now = [], time.monotonic()
        for engine_id, generation in list(wanted.items())[:MOST_HINTED]:
            if (hint := self._hints.get((endpoint, engine_id), generation)) is not None:
                known.append(KnownHints(engine_id=engine_id, generation=generation, version=hint.version))
            elif (last := unkept.get(engine_id)) and last.known.generation == generation and now < last.until:
                known.append(last.known)
        return tuple(known)


def _of_use(peers: Mapping[str, PeerEngine]) -> dict[str, str]:
    """Those that share prefixes and were given to an engine here, with their generations."""
    return {
        engine_id: peer.card.generation
        for engine_id, peer in peers.items()
        if peer.state == "ready" and peer.users and peer.card.engine.facts.get(SCHEME_FACT)
    }
