"""What one thread of a worker holds of its peer engine, as operators see it, and the order to give that up.

Threads write it down as they work, and the session's thread reads it: a thread that is stuck in its backend is the one
that an operator asks about.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from kvd.backends.contract import Holding, Lane, holdings_of
from kvd.wire.agent import HeldPeer, Use
from kvd.worker.cause import Cause

HeldLane: TypeAlias = tuple[str, Lane]
"""A lane with the generation of the peer that it goes to."""


@dataclass(frozen=True, slots=True)
class Evict:
    """To a thread: close what goes to a generation of its peer, to any where none is named.

    Without a ``cause`` nothing is closed that a load uses; with one such loads are misses.
    """

    generation: str
    cause: Cause | None

    def concerns(self, generation: str) -> bool:
        """Whether what goes to that generation is to be closed."""
        return self.generation in ("", generation)


def held_lanes(
    engine_id: str,
    use: Use,
    lanes: Iterable[HeldLane],
    stuck: Iterable[HeldLane],
    *,
    loads: int,
    loading_bytes: int,
    busy: str,
) -> list[HeldPeer]:
    """What lanes to one peer hold, generation by generation; the first of ``lanes`` is what ``loads`` are on."""
    of: dict[str, tuple[list[Lane], list[Lane]]] = {}
    for where, (generation, lane) in itertools.chain(
        ((0, one) for one in lanes), ((1, one) for one in stuck)
    ):
        of.setdefault(generation, ([], []))[where].append(lane)
    found: list[HeldPeer] = []
    for generation, (open_, closing) in of.items():
        peers: dict[str, Holding] = {}
        for held in (held for lane in (*open_, *closing) for held in holdings_of(lane)):
            other = peers.get(held.peer)
            peers[held.peer] = held if other is None else held.joined(other)
        mapped = [one.mapped for one in peers.values() if one.mapped is not None]
        first = not found
        found.append(
            HeldPeer(
                engine_id=engine_id,
                generation=generation,
                use=use,
                lanes=len(open_) + len(closing),
                stuck=len(closing),
                workers=len(peers),
                regions=sum(one.regions for one in peers.values()),
                bytes=sum(one.nbytes for one in peers.values()),
                mapped_bytes=sum(mapped) if len(mapped) == len(peers) else None,
                loads=loads if first else 0,
                loading_bytes=loading_bytes if first else 0,
                ended=any(one.ended for one in peers.values()),
                busy=busy,
            )
        )
    return found
