"""How many requests of an engine were quietly not handed over of late, beside what its other engines counted. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvd.wire.miss import MissCode
from kvd.wire.outcomes import Outcome, OutcomeRow

Lost = Literal["plain", "unused", "refused", "missed", "unclaimed", "not_offered"]
"""Why a prompt was computed in vain or twice: outcomes of `kvd.wire.outcomes`, and leases that nobody claimed."""
FORCED: MissCode = "FORCED"
"""The code of misses that an operator ordered."""


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """One engine of late."""

    row: OutcomeRow

    def requests(self, *outcomes: Outcome) -> int:
        """Requests of these outcomes."""
        return sum(count.requests for count in self.row.lately if count.outcome in outcomes)

    def tokens(self, *outcomes: Outcome) -> int:
        """Tokens of these outcomes."""
        return sum(count.tokens for count in self.row.lately if count.outcome in outcomes)

    def code(self, outcome: Outcome) -> str:
        """The code that most requests of an outcome have, without those that an operator ordered."""
        found = [n for n in self.row.lately if n.outcome == outcome and n.code != FORCED]
        return max(found, key=lambda n: n.requests).code if found else ""

    @property
    def idle(self) -> bool:
        """Whether it was asked for nothing."""
        return not self.row.lately and not self.row.leases

    @property
    def in_the_dark(self) -> bool:
        """Whether it plays either role, and nobody has asked it to play any."""
        return self.row.role == "both" and all(count.outcome == "plain" for count in self.row.lately)

    @property
    def hands_over(self) -> bool:
        """Whether it is asked to prefill for others, or is there for that."""
        return self.row.role == "prefill" or self.requests("offered", "pushed", "not_offered") > 0

    @property
    def mean_prefill(self) -> float:
        """Tokens of a prefill that it kept."""
        requests = self.requests("offered")
        return self.tokens("offered") / requests if requests else 1.0


@dataclass(frozen=True, slots=True)
class Loss:
    """What was not handed over at one engine: (requests, tokens) by kind, and all that could have been."""

    engine: ServedEngine
    kinds: dict[Lost, tuple[int, float]]
    requests: int
    tokens: float

    @property
    def lost(self) -> tuple[int, float]:
        """Requests and tokens of all kinds."""
        return sum(n for n, _ in self.kinds.values()), sum(t for _, t in self.kinds.values())

    @property
    def share(self) -> float:
        """Of the prompt tokens."""
        return self.lost[1] / self.tokens if self.tokens else 0.0

    @property
    def main(self) -> Lost:
        """The kind with most tokens."""
        return max(self.kinds, key=lambda kind: self.kinds[kind][1])


@dataclass(frozen=True, slots=True)
class LossScene:
    """An engine's loss, and the other engines of its model that are known."""

    loss: Loss
    others: Sequence[ServedEngine]

    @property
    def me(self) -> ServedEngine:
        """The engine."""
        return self.loss.engine

    @property
    def prefillers(self) -> list[ServedEngine]:
        """Others that prefill."""
        return [engine for engine in self.others if engine.hands_over]

    @property
    def decoders(self) -> list[ServedEngine]:
        """Others that decode."""
        return [engine for engine in self.others if engine.row.role != "prefill" and not engine.hands_over]

    def some(self, engines: Iterable[ServedEngine], count: Callable[[ServedEngine], int]) -> str:
        """``prefill-0 (40), prefill-1 (3)``: those with a count."""
        found = [(engine.row.engine_id, count(engine)) for engine in engines if count(engine)]
        return ", ".join(f"{name} ({number})" for name, number in found)


def decoding(engine: ServedEngine) -> Loss:
    """What came to an engine that decodes and was computed there."""
    kinds: dict[Lost, tuple[int, float]] = {
        kind: _without_forced(engine, kind) for kind in ("refused", "missed", "unused")
    }
    if engine.row.role == "decode" or engine.in_the_dark:
        kinds["plain"] = (engine.requests("plain"), engine.tokens("plain"))
    loaded, tokens = engine.requests("loaded", "cached"), engine.tokens("loaded", "cached")
    return _loss(engine, kinds, loaded, tokens)


def prefilling(engine: ServedEngine) -> Loss:
    """What an engine prefilled and nobody wanted, or could not keep."""
    row, mean = engine.row, engine.mean_prefill
    kinds: dict[Lost, tuple[int, float]] = {
        "not_offered": (engine.requests("not_offered"), engine.tokens("not_offered")),
        "unclaimed": (row.unclaimed, row.unclaimed * mean),
    }
    if row.role == "prefill":
        kinds["plain"] = (engine.requests("plain"), engine.tokens("plain"))
    claimed = row.leases - row.unclaimed
    return _loss(engine, kinds, engine.requests("pushed") + claimed, engine.tokens("pushed") + claimed * mean)


def _loss(engine: ServedEngine, kinds: dict[Lost, tuple[int, float]], requests: int, tokens: float) -> Loss:
    lost = Loss(engine, kinds, 0, 0.0).lost
    return Loss(engine, kinds, requests + lost[0], tokens + lost[1])


def _without_forced(engine: ServedEngine, kind: Outcome) -> tuple[int, float]:
    counted = [n for n in engine.row.lately if n.outcome == kind and n.code != FORCED]
    return sum(n.requests for n in counted), sum(n.tokens for n in counted)
