"""Findings: whether a local engine can read from a peer, found once for each two shapes of engine."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from kvd.service.engines.local_engine import LocalEngine
from kvd.service.errors import RequestRefused
from kvd.service.fairness.tally import Tally
from kvd.service.peers.card_shape import CardShapes
from kvd.service.peers.comparer.pool import Comparer, Whose
from kvd.service.peers.exchanges import Exchanges
from kvd.service.peers.peer_engine import PeerEngine
from kvd.topology.findings import ONE_ID
from kvd.wire.card_parts import text_bytes
from kvd.wire.identity import Endpoint
from kvd.wire.reply import RefusalFactor, Refused

Factors = tuple[RefusalFactor, ...]
Turn = Callable[[Whose], AbstractAsyncContextManager[Comparer]]
ShapePair = tuple[str, str]
KEPT = 4096
"""Most pairs whose finding is remembered."""
KEPT_BYTES = 16 << 20
"""Most that they take. Those that fit take 300 bytes; one that does not has the texts of two engines' facts."""
FINDING_BYTES = 512
AGAIN_SECONDS = 30.0
"""A pair that was refused is compared again when it is asked for after this long: nothing is refused for ever."""


@dataclass(frozen=True, slots=True)
class _Finding:
    """The factors that fail, none where the two fit, or why they could not be compared; found at time.monotonic().

    ``whose`` is the line in which the pair waited to be compared.
    """

    bad: Factors
    at: float
    whose: Whose
    refusal: Refused | None = None
    size: int = FINDING_BYTES

    def holds(self) -> bool:
        """Whether it may still be used. That two shapes fit does not change."""
        return not (self.bad or self.refusal) or time.monotonic() - self.at < AGAIN_SECONDS


class CompatibilityCache:
    """The factors that fail, by the shapes of two engines: an engine's replicas, and its next start, are alike.

    A peer's shape is made here from its card, a small one's without a process. What its kvd says of it decides nothing.
    """

    def __init__(self, turn: Turn, counters: Counter[str]) -> None:
        """``turn`` gives somebody who compares, when it is the turn of those whose engines these are."""
        self._turn = turn
        self._shapes = CardShapes()
        self._counters = counters
        self._found: dict[ShapePair, _Finding] = {}
        self.exchanges = Exchanges()
        """Of the pairs that fit."""
        self._kept: Tally[Whose] = Tally()
        self._comparing: dict[ShapePair, asyncio.Task[Factors]] = {}

    async def find(self, local: LocalEngine, where: Endpoint, peer: PeerEngine) -> tuple[bool, Factors]:
        """Whether it was known, and the factors that fail between ``local`` and ``peer``: none where they fit.

        However many ask at the same time, the two are compared once. Raises `RequestRefused` where they cannot be.
        """
        mine = local.shape or local.generation
        if peer.shape and (known := self._known((mine, peer.shape))) is not None:
            return True, known
        pair = mine, f"{where} {peer.card.engine.engine_id} {peer.card.generation}"
        if (known := self._known(pair)) is not None:
            return True, known
        task = self._comparing.get(pair)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._find(local, where, peer, mine, pair))
            self._comparing[pair] = task
            task.add_done_callback(lambda done: self._done(pair, done))
        # Shielded: one asker that is given up must not end it for the others.
        return False, await asyncio.shield(task)

    def _known(self, pair: ShapePair) -> Factors | None:
        finding = self._found.get(pair)
        if finding is None:
            return None
        if not finding.holds():
            self._forget(pair)
            return None
        if finding.refusal is not None:
            # A new one: raised again, one would gather the frames of all who ever asked.
            raise RequestRefused.passed_on(finding.refusal)
        return finding.bad

    async def _find(
        self, local: LocalEngine, where: Endpoint, peer: PeerEngine, mine: str, pair: ShapePair
    ) -> Factors:
        # Made once for all who ask: this task is theirs together.
        peer.shape = peer.shape or await self._shapes.find(peer.card, (where, peer.uid))
        if peer.shape and (known := self._known((mine, peer.shape))) is not None:
            return known
        # One user with many engines fills no line of pairs in which it has no part.
        whose = Whose(where, frozenset({local.uid, local.uid if peer.uid is None else peer.uid}))
        try:
            async with self._turn(whose) as comparer:
                found = await comparer.shape(peer.card)
                if not found.shape:
                    self._keep(whose, pair, found.bad)
                    return found.bad
                peer.shape = found.shape
                if (known := self._known((mine, found.shape))) is not None:
                    return known
                self._counters["handshakes.comparisons"] += 1
                same = (local.shape or local.generation) == mine  # it may have changed while this waited
                compared = await comparer.compare(local.card())
        except RequestRefused as refusal:
            if refusal.code == "KVD-COMPARE-LIMIT":
                self._keep(whose, pair, (), refusal.refused)
            raise
        if same and local.shape == mine and compared.exchange is not None:
            self.exchanges.keep(whose, (mine, found.shape), compared.exchange)
        if same:
            self._keep(whose, (mine, found.shape), compared.bad)
        return compared.bad

    def _keep(self, whose: Whose, pair: ShapePair, bad: Factors, refusal: Refused | None = None) -> None:
        """Remember a finding. Of too many the oldest goes of those whose findings take most."""
        self._forget(pair)
        size = FINDING_BYTES + text_bytes(
            (*pair, *(text for f in bad for text in (f.name, f.local, f.remote, f.note)))
        )
        self._found[pair] = _Finding(bad, time.monotonic(), whose, refusal, size)
        self._kept.add(whose, size)
        while len(self._found) > KEPT or self._kept.total > KEPT_BYTES:
            most = max(self._kept.of, key=lambda one: self._kept[one])
            self._forget(next(old for old, finding in self._found.items() if finding.whose == most))

    def _forget(self, pair: ShapePair) -> None:
        if (finding := self._found.pop(pair, None)) is not None:
            self._kept.add(finding.whose, -finding.size)

    def _done(self, pair: ShapePair, done: asyncio.Task[Factors]) -> None:
        del self._comparing[pair]
        if not done.cancelled():
            done.exception()  # looked at here, since everyone who waited may have left


def unlike(bad: Factors) -> str:
    """The factors that fail, with both values. That no plan can be made says nothing by itself: its reason does."""
    return "; ".join(
        f.note if f.name == "plan" and f.note else f"{f.name} is {f.local} here and {f.remote} there"
        for f in bad
    )


def next_step(bad: Factors, local: str, remote: str) -> str:
    """What to do about the factors that fail between two engines, by their ids."""
    compared = f"`kvctl describe-topology {local} {remote}` compares the two factor by factor"
    if {"model", "config", "weights"}.isdisjoint(factor.name for factor in bad):
        return compared
    return f"load the same checkpoint on both sides, or {ONE_ID} if their KV may be exchanged all the same; {compared}"
