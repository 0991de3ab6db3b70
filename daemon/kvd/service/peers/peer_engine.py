"""A peer engine as this kvd knows it, and what is told of it to local clients."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from kvd.service.engines.local_engine import briefly
from kvd.wire.card_parts import kept_bytes, part_from, with_workers
from kvd.wire.handshake import CardOutline, PeerReady
from kvd.wire.identity import Endpoint, EngineCard, Role

PeerEngineKey = tuple[Endpoint, str]
"""Where a peer engine is and its id; `HERE` for one at this kvd."""
ANSWERS_KEPT = 32
"""Most answers of one peer that are kept ready: all ranks of an engine ask for the same ones."""


@dataclass(slots=True)
class PeerEngine:
    """A peer engine as fetched; ``shape`` as it was made of its card here, empty until then.

    ``users`` are the local engines that were given it, with their generation then; ``friends`` those that were at any
    time, also in an earlier generation of either: they are given the next one unasked. ``uid`` is the user whose it is,
    for one at this kvd. ``draining``: its kvd said at the last ping that it is to be given nothing new.
    """

    card: EngineCard
    shape: str = ""
    state: Literal["ready", "unreachable", "gone"] = "ready"
    reason: str = ""
    since: float = field(default_factory=time.time)
    users: dict[str, str] = field(default_factory=dict)
    friends: set[str] = field(default_factory=set)
    size: int = 0
    uid: int | None = None
    draining: bool = False
    _answers: OrderedDict[tuple[str, bool, bool, bool, int | None], PeerReady] = field(
        default_factory=OrderedDict
    )
    """By what they differ in: the local engine, if the peer was fetched just now, whether it is brief, whether it is
    for outlines, which part."""

    def __post_init__(self) -> None:
        """``size`` is about the bytes that its card takes."""
        self.size = self.size or kept_bytes(self.card)

    def change(self, state: Literal["ready", "unreachable", "gone"], reason: str) -> None:
        """It is in another state from now on."""
        self.state, self.reason, self.since = state, reason, time.time()

    def forget_answers(self) -> None:
        """Nobody is told of it any more."""
        self._answers.clear()

    def shed(self) -> None:
        """It is gone, and of its card remembered whose it was."""
        self.card = with_workers(msgspec.structs.replace(self.card, engine=briefly(self.card.engine)), ())
        self.size = kept_bytes(self.card)

    def learn_key(self, key: bytes) -> None:
        """Its scheduler came after its workers, or is another one: whoever asks is to have that one's key."""
        if key and key != self.card.digest_key:
            self.card = msgspec.structs.replace(self.card, digest_key=key)
            self._answers.clear()

    def answer(
        self,
        local_engine: str,
        endpoint: Endpoint,
        seconds: float,
        *,
        brief: bool,
        first: int | None = None,
        outline: CardOutline | None = None,
    ) -> PeerReady:
        """What a client of a local engine is told of it: one object for all that are told the same.

        ``brief``: a scheduler needs none of the workers, and it alone gets the key. ``first``: the part from this
        worker on, and not the whole. With an ``outline`` that is told in its place.
        """
        which = local_engine, seconds > 0, brief, outline is not None, None if brief or outline else first
        ready = self._answers.get(which)
        if ready is None:
            whole = not brief and first is None and outline is None
            card = msgspec.structs.replace(
                self.card,
                workers=self.card.workers if whole else (),
                digest_key=self.card.digest_key if brief else b"",
            )
            ready = self._answers[which] = PeerReady(
                local_engine=local_engine,
                peer=card,
                endpoint=endpoint,
                seconds=seconds,
                cached=seconds == 0,
                part=part_from(self.card, max(0, first or 0)) if not (brief or whole or outline) else None,
            )
            if len(self._answers) > ANSWERS_KEPT:
                self._answers.popitem(last=False)
        return ready if outline is None else msgspec.structs.replace(ready, outline=outline)


def complementary(local: Role, peer: Role) -> bool:
    """Whether KV can move between engines of these roles."""
    return "both" in (local, peer) or local != peer
