"""A peer engine as this kvd knows it, and what is told of it to local clients."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from kvd.wire.handshake import PeerReady
from kvd.wire.identity import Endpoint, EngineCard

Key = tuple[Endpoint, str]
"""Where a peer engine is and its id; `HERE` for one at this kvd."""
HERE = Endpoint()


@dataclass(slots=True)
class PeerEngine:
    """A peer engine as fetched; ``shape`` as its kvd says.

    ``users`` are the local engines that were given it, with their generation then; ``friends`` those that were at any
    time, also in an earlier generation of either: they are given the next one unasked.
    """

    card: EngineCard
    shape: str = ""
    state: Literal["ready", "unreachable", "gone"] = "ready"
    reason: str = ""
    since: float = field(default_factory=time.time)
    users: dict[str, str] = field(default_factory=dict)
    friends: set[str] = field(default_factory=set)
    _answers: dict[tuple[str, bool, bool], PeerReady] = field(default_factory=dict)
    """By what they differ in: the local engine, whether the peer was fetched just now, whether it is brief."""

    def change(self, state: Literal["ready", "unreachable", "gone"], reason: str) -> None:
        """It is in another state from now on."""
        self.state, self.reason, self.since = state, reason, time.time()

    def learn_key(self, key: bytes) -> None:
        """Its scheduler came after its workers, or is another one: whoever asks is to have that one's key."""
        if key and key != self.card.digest_key:
            self.card = msgspec.structs.replace(self.card, digest_key=key)
            self._answers.clear()

    def answer(self, local_engine: str, endpoint: Endpoint, seconds: float, *, brief: bool) -> PeerReady:
        """What a client of a local engine is told of it: one object for all that are told the same.

        ``brief``: a scheduler needs none of the workers, and it alone gets the key.
        """
        which = local_engine, seconds > 0, brief
        ready = self._answers.get(which)
        if ready is None:
            left_out = {"workers": ()} if brief else {"digest_key": b""}
            ready = self._answers[which] = PeerReady(
                local_engine=local_engine,
                peer=msgspec.structs.replace(self.card, **left_out),
                endpoint=endpoint,
                seconds=seconds,
                cached=seconds == 0,
            )
        return ready
