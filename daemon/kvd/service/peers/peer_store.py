"""The peer engines that this kvd knows: by where they are, by their ids, and how much room they take."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from kvd.service.errors import RequestRefused
from kvd.service.fairness.tally import Tally
from kvd.service.peers.peer_engine import PeerEngine, PeerEngineKey
from kvd.wire.identity import HERE, Endpoint

MOST = 4096
"""Most peer engines that are known: 64 a host, of 64 hosts."""
MOST_OF_ONE = 256
"""Most of them from one kvd."""
MOST_BYTES = 112 << 20
"""Most bytes of all their cards. One of 4,096 workers of 80 layers has 25 MB, one of eight workers 50 KB."""
MOST_BYTES_OF_ONE = 80 << 20
"""Most of them from one kvd: one of the largest cards that are taken, and many others."""

ENDED_SECONDS = 60.0
"""So long the cards of engines that are gone are here yet: records of transfers from them are on their way to the
ledger, which describes their engines by these."""
ENDED_BYTES = 16 << 20
"""Most that they take; those that went first lose theirs."""

_NONE: Mapping[str, PeerEngine] = MappingProxyType({})
_NOWHERE: Mapping[Endpoint, PeerEngine] = MappingProxyType({})


class PeerStore:
    """Peer engines by endpoint and by id. A question about one kvd or one engine looks at no others."""

    def __init__(self) -> None:
        self._at: dict[Endpoint, dict[str, PeerEngine]] = {}
        self._named: dict[str, dict[Endpoint, PeerEngine]] = {}
        self._bytes: Tally[Endpoint] = Tally()
        self._ended: Tally[PeerEngineKey] = Tally()
        """The bytes of the cards of those that are gone, in the order in which they went."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[PeerEngineKey]:
        return ((where, engine_id) for where, peers in self._at.items() for engine_id in peers)

    def items(self) -> Iterator[tuple[PeerEngineKey, PeerEngine]]:
        """All of them; nothing is to be added or dropped meanwhile."""
        return (((where, name), peer) for where, peers in self._at.items() for name, peer in peers.items())

    def values(self) -> Iterator[PeerEngine]:
        """All of them without their keys; nothing is to be added or dropped meanwhile."""
        return (peer for peers in self._at.values() for peer in peers.values())

    def get(self, key: PeerEngineKey) -> PeerEngine | None:
        """The engine of that id at that kvd, gone ones too."""
        return self.at(key[0]).get(key[1])

    def at(self, endpoint: Endpoint) -> Mapping[str, PeerEngine]:
        """The engines behind one kvd, by id."""
        return self._at.get(endpoint, _NONE)

    def named(self, engine_id: str) -> Mapping[Endpoint, PeerEngine]:
        """Who is known by an id, by the kvd that told of it."""
        return self._named.get(engine_id, _NOWHERE)

    def put(self, key: PeerEngineKey, peer: PeerEngine) -> None:
        """Know an engine, in the place of the one that was known by that key."""
        self.drop(key)
        self._at.setdefault(key[0], {})[key[1]] = peer
        self._named.setdefault(key[1], {})[key[0]] = peer
        self._bytes.add(key[0], _counted(key, peer))
        self._count += 1

    def end(self, key: PeerEngineKey, reason: str) -> None:
        """An engine is gone. Its card is here for a while; its workers' cards may be nowhere else by then."""
        peer = self._at[key[0]][key[1]]
        peer.change("gone", reason)
        peer.forget_answers()
        self._ended.add(key, peer.size)
        self.shed(time.time() - ENDED_SECONDS)

    def shed(self, before: float) -> None:
        """Remember no more than whose it was, of who went before Unix time ``before``, and of what is too much."""
        while self._ended.of:
            key = next(iter(self._ended.of))
            peer = self._at[key[0]][key[1]]
            if peer.since >= before and self._ended.total <= ENDED_BYTES:
                return
            self._ended.add(key, -self._ended[key])
            counted = _counted(key, peer)
            peer.shed()
            self._bytes.add(key[0], _counted(key, peer) - counted)

    def drop(self, key: PeerEngineKey) -> None:
        """Know an engine no more; nothing where it was not known."""
        where, engine_id = key
        if (peer := self.get(key)) is None:
            return
        self._ended.add(key, -self._ended[key])
        del self._at[where][engine_id], self._named[engine_id][where]
        if not self._at[where]:
            del self._at[where]
        if not self._named[engine_id]:
            del self._named[engine_id]
        self._bytes.add(where, -_counted(key, peer))
        self._count -= 1

    def room_for(self, key: PeerEngineKey, size: int) -> list[PeerEngineKey]:
        """The unused peers to drop so that one of ``size`` bytes fits in; its own earlier card does not count.

        Raises `RequestRefused`, naming figure and limit.
        """
        endpoint, engine_id = key
        own = self.get(key)
        there, held = int(own is not None), _counted(key, own) if own is not None else 0
        ours = (((endpoint, name), peer) for name, peer in self.at(endpoint).items() if name != engine_id)
        leaving = _leaving(
            ours,
            (len(self.at(endpoint)) - there, self._bytes[endpoint] - held),
            (MOST_OF_ONE, MOST_BYTES_OF_ONE),
            size,
            f"the kvd at {endpoint} has",
        )
        freed = {at: _counted(at, peer) for at in leaving if (peer := self.get(at)) is not None}
        others = ((at, peer) for at, peer in self.items() if at != key and at not in freed)
        return leaving + _leaving(
            others,
            (self._count - there - len(freed), self._bytes.total - held - sum(freed.values())),
            (MOST, MOST_BYTES),
            size,
            "other kvds have",
        )


def _counted(key: PeerEngineKey, peer: PeerEngine) -> int:
    """What it counts among the cards of other kvds: those of this host are its clients', and count as theirs."""
    return 0 if key[0] == HERE else peer.size


def _leaving(
    among: Iterable[tuple[PeerEngineKey, PeerEngine]],
    has: tuple[int, int],
    most: tuple[int, int],
    size: int,
    who: str,
) -> list[PeerEngineKey]:
    """Which of ``among`` go, those first that changed longest ago. ``has`` and ``most`` are engines and bytes."""
    there, held = has
    leaving: list[PeerEngineKey] = []
    if _fits(there, held + size, most):
        return leaving
    unused = sorted(((at, peer) for at, peer in among if not peer.users), key=lambda one: one[1].since)
    for at, peer in unused:
        leaving.append(at)
        there, held = there - 1, held - _counted(at, peer)
        if _fits(there, held + size, most):
            return leaving
    raise RequestRefused(
        "KVD-TOO-LARGE",
        f"{who} {there} engines in use here, with cards of {held} bytes; one more of {size} bytes is over"
        f" {most[0]} engines or {most[1]} bytes",
        hint="kvd forgets engines that nobody uses; ask again when some have ended",
    )


def _fits(there: int, size: int, most: tuple[int, int]) -> bool:
    return there < most[0] and size <= most[1]
