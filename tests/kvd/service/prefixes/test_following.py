"""How other kvds are followed: what is asked of them once there is no room for what they tell."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.service.errors import PeerAway
from kvd.service.prefixes import following
from kvd.service.prefixes import hints as module
from kvd.service.prefixes.following import Followers
from kvd.service.prefixes.hints import Hints
from kvd.wire.identity import HERE, Endpoint
from kvd.wire.prefix import SCHEME_FACT
from kvd.wire.prefixes.hints import EngineHints, GetHints, HintChange, HintsTold

THERE = Endpoint("there", 1)


def change(version: int, tags: int) -> HintChange:
    """So many tags at first, then one of them again."""
    added = b"".join(number.to_bytes(8, "little") for number in range(tags if version == 1 else 1))
    return HintChange(version=version, since=version - 1, hash_tokens=16, every=1, added=added)


class Teller:
    """Another kvd with one engine, which tells of another tag before each answer; it goes after ``answers``."""

    def __init__(self, answers: int) -> None:
        self.links: dict[Endpoint, Any] = {}
        self.gone = asyncio.Event()
        self.hints, self.answers, self.told = Hints(Counter()), answers, list[HintChange]()

    def get(self, _endpoint: Endpoint) -> Teller:
        return self

    async def ask(self, question: GetHints, _seconds: float) -> HintsTold:
        if len(self.told) == self.answers:
            self.gone.set()
            raise PeerAway("it went")
        version = len(self.told) + 1
        self.hints.take((HERE, "a"), "s", change(version, 4))
        new = self.hints.since("a", "s", question.known[0].version if question.known else 0)
        assert new is not None
        self.told.append(new)
        return HintsTold(engines=(EngineHints(engine_id="a", generation="g", change=new),))


def follow(teller: Teller) -> Hints:
    engine = SimpleNamespace(facts={SCHEME_FACT: "sha256"})
    card = SimpleNamespace(generation="g", engine=engine)
    peer = SimpleNamespace(state="ready", users={"d": "h"}, card=card)
    hints = Hints(Counter())
    hints.take((HERE, "b"), "s", change(1, 3))

    async def run() -> None:
        peers: Any = SimpleNamespace(at=lambda _endpoint: {"a": peer})
        links: Any = teller
        followers = Followers(links, hints, peers, Counter())
        followers.follow(THERE)
        await teller.gone.wait()
        await followers.close()

    asyncio.run(run())
    return hints


def test_what_there_is_no_room_for_is_not_told_whole_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KEPT", 6)
    teller = Teller(3)
    follow(teller)
    assert [change.since for change in teller.told] == [0, 1, 2]


def test_all_of_it_is_asked_for_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KEPT", 6)
    monkeypatch.setattr(following, "UNKEPT_SECONDS", 0.0)
    teller = Teller(3)
    follow(teller)
    assert [change.since for change in teller.told] == [0, 0, 0]
