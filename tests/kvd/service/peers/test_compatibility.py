"""Two shapes of engine are compared once, however many ask and however often they start."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import pytest

from kvd.service.engines.local_engine import LocalEngine
from kvd.service.peers.compatibility import CompatibilityCache, compare_cards, rehearse
from kvd.wire.identity import EngineCard
from kvd.wire.reply import RefusalFactor
from tests.support.daemons import facts, worker

BAD = RefusalFactor("tp", "1", "3", ok=False)


class Comparisons:
    """Stands for a comparison: counts, fails as often as it is told to, gives one factor that fits and one not."""

    def __init__(self, failures: int = 0) -> None:
        self.made = 0
        self.failures = failures

    def __call__(self, *_: object) -> tuple[RefusalFactor, ...]:
        self.made += 1
        if self.made <= self.failures:
            raise OSError("no thread")
        return (RefusalFactor("model", "m", "m", ok=True), BAD)


def local(shape: str = "here", generation: str = "g") -> LocalEngine:
    return LocalEngine(facts("d"), generation=generation, shape=shape)


def card(generation: str = "h") -> EngineCard:
    return EngineCard(engine=facts("p"), generation=generation, workers=())


def test_all_who_ask_at_once_share_one_comparison_and_later_ones_find_it_known() -> None:
    comparisons = Comparisons()
    verdicts = CompatibilityCache(comparisons, Counter())

    async def ask() -> None:
        together = await asyncio.gather(*(verdicts.find(local(), card(), "there") for _ in range(20)))
        assert together == [(False, (BAD,))] * 20
        assert await verdicts.find(local(generation="g2"), card("h2"), "there") == (True, (BAD,))

    asyncio.run(ask())
    assert comparisons.made == 1


def test_a_peer_that_tells_no_shape_is_compared_once_a_generation() -> None:
    comparisons = Comparisons()
    verdicts = CompatibilityCache(comparisons, Counter())

    async def ask() -> None:
        known = [(await verdicts.find(local(), card(generation), ""))[0] for generation in ("h", "h", "h2")]
        assert known == [False, True, False]

    asyncio.run(ask())
    assert comparisons.made == 2


def test_a_comparison_that_failed_is_made_again() -> None:
    comparisons = Comparisons(failures=1)
    verdicts = CompatibilityCache(comparisons, Counter())

    async def ask() -> None:
        with pytest.raises(OSError, match="no thread"):
            await verdicts.find(local(), card(), "there")
        assert await verdicts.find(local(), card(), "there") == (False, (BAD,))

    asyncio.run(ask())


def test_a_card_that_cannot_be_read_is_a_factor_that_fails() -> None:
    good = EngineCard(engine=facts("d"), generation="g", workers=(worker(facts("d")).card,))
    bad = EngineCard(engine=facts("p"), generation="h", workers=(worker(facts("p")).card,))
    rehearse()
    assert all(factor.ok for factor in compare_cards(good, (), bad))
    spoilt = msgspec.structs.replace(bad.workers[0], geometry=b"{}")
    (factor,) = compare_cards(good, (), msgspec.structs.replace(bad, workers=(spoilt,)))
    assert not factor.ok
    assert "format" in factor.remote
