"""Follows what other kvds tell of their engines: one question to each waits there until something is new.

A kvd is followed from the first question for a prefix that its engines might hold, until none of them is of use here.
An earlier kvd refuses, and its engines are asked as if nothing could be known of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvd.service.background_tasks import BackgroundTasks
from kvd.service.errors import PeerAway
from kvd.service.peers.links import PeerLinks
from kvd.service.peers.peer_engine import PeerEngine
from kvd.service.peers.peer_store import PeerStore
from kvd.service.prefixes.hints import Hints
from kvd.wire.identity import Endpoint
from kvd.wire.prefix import SCHEME_FACT
from kvd.wire.prefixes.hints import MOST_HINTED, WAIT_SECONDS, GetHints, HintsTold, KnownHints

LEAST_PAUSE = 0.1
MOST_ANSWERS = 100.0
"""Answers a second that this kvd wants, of all others together: of 256 hosts each is asked every 2.5 s."""
HOP_SECONDS = 2.0
"""What an answer may take beside the waiting for something new."""


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
        try:
            while wanted := _of_use(self._peers.at(endpoint)):
                self._hints.drop_all_at(endpoint, but=wanted)
                pause = max(LEAST_PAUSE, len(self._followed) / MOST_ANSWERS)
                question = GetHints(known=self._known(endpoint, wanted), after=pause)
                answer = await self._links.get(endpoint).ask(question, pause + WAIT_SECONDS + HOP_SECONDS)
                self._counters["prefixes.hint_answers"] += 1
                if not isinstance(answer, HintsTold):
                    self._silent[endpoint] = self._generation(endpoint)
                    return
                for one in answer.engines:
                    if wanted.get(one.engine_id) == one.generation:
                        self._hints.take((endpoint, one.engine_id), one.generation, one.change)
        except PeerAway:
            pass  # the next question for a prefix begins anew
        finally:
            self._followed.discard(endpoint)
            self._hints.drop_all_at(endpoint)

    def _known(self, endpoint: Endpoint, wanted: Mapping[str, str]) -> tuple[KnownHints, ...]:
        known = []
        for engine_id, generation in list(wanted.items())[:MOST_HINTED]:
            if (hint := self._hints.get((endpoint, engine_id), generation)) is not None:
                known.append(KnownHints(engine_id=engine_id, generation=generation, version=hint.version))
        return tuple(known)


def _of_use(peers: Mapping[str, PeerEngine]) -> dict[str, str]:
    """Those that share prefixes and were given to an engine here, with their generations."""
    return {
        engine_id: peer.card.generation
        for engine_id, peer in peers.items()
        if peer.state == "ready" and peer.users and peer.card.engine.facts.get(SCHEME_FACT)
    }
