"""Room for peer engines: how many are known, and how many bytes their cards have, in all and from one kvd."""

from __future__ import annotations

from collections.abc import Mapping

from kvd.service.errors import RequestRefused
from kvd.service.peers.peer_engine import Key, PeerEngine

MOST = 4096
"""Most peer engines that are known: 64 a host, of 64 hosts."""
MOST_OF_ONE = 256
"""Most of them from one kvd."""
MOST_BYTES = 144 << 20
"""Most bytes of all their cards. One of 4,096 workers of 80 layers has 25 MB, one of eight workers 50 KB."""
MOST_BYTES_OF_ONE = 112 << 20
"""Most of them from one kvd: one of the largest cards that are taken, and many others."""


def room_for(peers: Mapping[Key, PeerEngine], key: Key, size: int) -> list[Key]:
    """The unused peers to forget so that one of ``size`` bytes fits in; its own earlier card does not count.

    Raises `RequestRefused`, naming figure and limit.
    """
    endpoint = key[0]
    others = {at: peer for at, peer in peers.items() if at != key}
    ours = {at: peer for at, peer in others.items() if at[0] == endpoint}
    who = f"the kvd at {endpoint}"
    leaving = _leaving(ours, size, MOST_OF_ONE, MOST_BYTES_OF_ONE, f"{who} has")
    for at in leaving:
        del others[at]
    return leaving + _leaving(others, size, MOST, MOST_BYTES, "other kvds have")


def _leaving(among: Mapping[Key, PeerEngine], size: int, count: int, most: int, who: str) -> list[Key]:
    there, total = len(among), sum(peer.size for peer in among.values())
    leaving: list[Key] = []
    if there < count and total + size <= most:
        return leaving
    for at in sorted((at for at in among if not among[at].users), key=lambda at: among[at].since):
        leaving.append(at)
        there, total = there - 1, total - among[at].size
        if there < count and total + size <= most:
            return leaving
    raise RequestRefused(
        "KVD-TOO-LARGE",
        f"{who} {there} engines in use here, with cards of {total} bytes; one more of {size} bytes is over"
        f" {count} engines or {most} bytes",
        hint="kvd forgets engines that nobody uses; ask again when some have ended",
    )
