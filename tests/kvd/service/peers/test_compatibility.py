"""Two shapes of engine are compared once, however many ask and however often they start; nothing is wrong for ever."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvd.service.engines.local_engine import LocalEngine
from kvd.service.errors import RequestRefused
from kvd.service.peers import compatibility
from kvd.service.peers.card_shape import CardShapes
from kvd.service.peers.comparer.messages import Exchange, Found
from kvd.service.peers.comparer.pool import Whose
from kvd.service.peers.compatibility import CompatibilityCache
from kvd.service.peers.peer_engine import PeerEngine
from kvd.wire.identity import HERE, Endpoint, EngineCard
from kvd.wire.reply import RefusalFactor
from tests.support.daemons import facts, worker

BAD = RefusalFactor("tp", "1", "3", ok=False)
THERE = Endpoint("there", 1)


class Comparisons:
    """Stands for whoever compares: counts, and fails as often as it is told to. A shape is a card's model."""

    def __init__(self, failures: int = 0, error: Exception | None = None, shape: str = "there") -> None:
        self.made = self.shapes = 0
        self.turns: list[Whose] = []
        self.failures = failures
        self.error = error or OSError("no process")
        self.found = Found(shape=shape) if shape else Found(bad=(BAD,))

    @asynccontextmanager
    async def turn(self, peer: Whose) -> AsyncIterator[Comparisons]:
        self.turns.append(peer)
        yield self

    async def shape(self, _peer: EngineCard) -> Found:
        self.shapes += 1
        return self.found

    async def compare(self, _local: EngineCard) -> Found:
        await asyncio.sleep(0)
        self.made += 1
        if self.made <= self.failures:
            raise self.error
        return Found(bad=(BAD,))


def verdicts_by(comparisons: Comparisons) -> CompatibilityCache:
    return CompatibilityCache(comparisons.turn, Counter())


def local(shape: str = "here", generation: str = "g") -> LocalEngine:
    return LocalEngine(facts("d"), generation=generation, shape=shape)


def peer(generation: str = "h") -> PeerEngine:
    return PeerEngine(EngineCard(engine=facts("p"), generation=generation, workers=()))


def test_all_who_ask_at_once_share_one_comparison_and_a_replica_is_found_known() -> None:
    comparisons = Comparisons()
    verdicts = verdicts_by(comparisons)

    async def ask() -> None:
        first = peer()
        together = await asyncio.gather(*(verdicts.find(local(), THERE, first) for _ in range(20)))
        assert together == [(False, (BAD,))] * 20
        assert first.shape == "there"
        assert await verdicts.find(local(generation="g2"), THERE, first) == (True, (BAD,))
        replica = peer("h2")
        assert await verdicts.find(local(), Endpoint("elsewhere", 1), replica) == (False, (BAD,))
        assert replica.shape == "there"

    asyncio.run(ask())
    assert (comparisons.made, comparisons.shapes) == (1, 2)


def test_a_small_replica_of_a_known_peer_needs_nobody_who_compares() -> None:
    async def ask() -> None:
        def small(engine_id: str, model: str = "tiny") -> PeerEngine:
            card = worker(facts(engine_id, model=model)).card
            return PeerEngine(EngineCard(engine=card.engine, generation="h", workers=(card,)))

        shape = await CardShapes().find(small("p").card, THERE)
        comparisons = Comparisons(shape=shape)
        verdicts = verdicts_by(comparisons)
        for peer_engine in (small("p"), small("replica")):
            together = await asyncio.gather(*(verdicts.find(local(), THERE, peer_engine) for _ in range(5)))
            assert together == [(False, (BAD,))] * 5
            assert await verdicts.find(local(), THERE, peer_engine) == (True, (BAD,))
        assert (comparisons.made, comparisons.shapes) == (1, 1)
        await verdicts.find(local(), THERE, small("other", model="another"))
        assert comparisons.shapes == 2

    asyncio.run(ask())


def test_pairs_of_this_host_wait_in_the_line_of_both_users_and_others_in_that_of_their_kvd_and_its_asker() -> (
    None
):
    comparisons = Comparisons()
    verdicts = verdicts_by(comparisons)

    async def ask() -> None:
        for mine, where, uid in ((1, HERE, 1), (1, HERE, 2), (2, HERE, 1), (1, THERE, None)):
            asker = local(shape=f"{mine} {where} {uid}")
            asker.uid = mine
            await verdicts.find(asker, where, PeerEngine(peer().card, uid=uid))

    asyncio.run(ask())
    assert [(turn.endpoint, set(turn.users)) for turn in comparisons.turns] == [
        (HERE, {1}), (HERE, {1, 2}), (HERE, {1, 2}), (THERE, {1}),
    ]  # fmt: skip


def test_one_users_many_pairs_push_out_no_finding_of_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "KEPT", 4)
    comparisons = Comparisons()
    verdicts = verdicts_by(comparisons)

    async def ask() -> None:
        honest = peer()
        await verdicts.find(local(), THERE, honest)
        for number in range(20):
            hostile = local(shape=f"made up {number}")
            hostile.uid = 7
            await verdicts.find(hostile, THERE, peer())
        assert await verdicts.find(local(), THERE, honest) == (True, (BAD,))
        assert len(verdicts._found) == 4

    asyncio.run(ask())


def test_a_pair_that_was_refused_is_compared_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    comparisons = Comparisons()
    verdicts = verdicts_by(comparisons)

    async def ask() -> None:
        one = peer()
        await verdicts.find(local(), THERE, one)
        await verdicts.find(local(), THERE, one)
        assert comparisons.made == 1
        monkeypatch.setattr(compatibility, "AGAIN_SECONDS", 0.0)
        await verdicts.find(local(), THERE, one)
        assert comparisons.made == 2

    asyncio.run(ask())


def test_a_card_that_cannot_be_read_is_not_read_for_each_who_asks() -> None:
    comparisons = Comparisons(shape="")
    verdicts = verdicts_by(comparisons)

    async def ask() -> None:
        unreadable = peer()
        found = [await verdicts.find(local(), THERE, unreadable) for _ in range(3)]
        assert found == [(False, (BAD,)), (True, (BAD,)), (True, (BAD,))]

    asyncio.run(ask())
    assert (comparisons.made, comparisons.shapes) == (0, 1)


def test_a_comparison_that_took_too_long_is_refused_for_a_while_and_then_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comparisons = Comparisons(failures=1, error=RequestRefused("KVD-COMPARE-LIMIT", "5 s"))
    verdicts = verdicts_by(comparisons)

    async def ask() -> None:
        for _ in range(3):
            with pytest.raises(RequestRefused, match="5 s"):
                await verdicts.find(local(), THERE, peer())
        assert comparisons.made == 1
        refusals = []
        for _ in range(2):
            with pytest.raises(RequestRefused) as again:
                await verdicts.find(local(), THERE, peer())
            refusals.append(again.value)
        assert refusals[0] is not refusals[1], "one would gather the frames of all who asked"
        monkeypatch.setattr(compatibility, "AGAIN_SECONDS", 0.0)
        assert await verdicts.find(local(), THERE, peer()) == (False, (BAD,))

    asyncio.run(ask())


def test_a_comparison_that_failed_is_made_again() -> None:
    comparisons = Comparisons(failures=1)
    verdicts = verdicts_by(comparisons)

    async def ask() -> None:
        with pytest.raises(OSError, match="no process"):
            await verdicts.find(local(), THERE, peer())
        assert await verdicts.find(local(), THERE, peer()) == (False, (BAD,))

    asyncio.run(ask())


def test_findings_are_remembered_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors name what others wrote: 4,096 verdicts of wide texts were 800 MiB."""
    monkeypatch.setattr(compatibility, "KEPT_BYTES", 1 << 16)
    wide = RefusalFactor("model", "m" * 499 + "\U0001f600", "n" * 499 + "\U0001f600", ok=False)

    class Wide(Comparisons):
        async def compare(self, _local: EngineCard) -> Found:
            return Found(bad=(wide,) * 4)

    verdicts = verdicts_by(Wide())

    async def ask() -> None:
        for number in range(20):
            await verdicts.find(local(shape=f"made up {number}"), THERE, peer())

    asyncio.run(ask())
    assert len(verdicts._found) == 3  # each of 4 factors with two texts of 2,000 bytes


def test_of_an_engine_that_changed_while_it_waited_nothing_is_kept_under_its_earlier_shape() -> None:
    exchange = Exchange(b"layout", ((0,),))

    class Changing(Comparisons):
        """The engine has another worker by the time at which the peer's shape is known."""

        async def shape(self, _peer: EngineCard) -> Found:
            asker.shape = then
            return await super().shape(_peer)

        async def compare(self, _local: EngineCard) -> Found:
            self.made += 1
            return Found(exchange=exchange)

    async def ask() -> None:
        assert await verdicts.find(asker, THERE, peer()) == (False, ())

    for then, kept in (("here", True), ("another", False), ("", False)):
        comparisons, asker = Changing(), local()
        verdicts = verdicts_by(comparisons)
        asyncio.run(ask())
        found = [pair for pair in (("here", "there"), (then, "there")) if pair in verdicts._found]
        assert found == [("here", "there")] * 2 * kept
        assert list(verdicts.exchanges._kept) == [("here", "there")] * kept
