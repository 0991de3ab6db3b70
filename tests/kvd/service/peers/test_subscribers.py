"""Who uses which engines of ours: only of engines that are here, and of one host only so much."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from uuid import uuid4

import msgspec

from kvd.service.engines.local_engine import Client, LocalEngine
from kvd.service.engines.registry import Registry
from kvd.service.peers.subscribers import EXPECTED_BYTES, MOST_OF_KEY, Subscribers
from kvd.service.sockets.events import Events
from kvd.wire.frame import Message
from kvd.wire.handshake import EnginesChanged, Ping
from tests.support.daemons import facts, worker

A, B = b"A" * 40, b"B" * 40


def ready(registry: Registry, engine_id: str) -> LocalEngine:
    incarnation = uuid4().hex
    card = worker(facts(engine_id), 0, incarnation).card
    return registry.register(
        Client("worker", card.engine, incarnation, 1, incarnation.encode(), rank=card.rank, card=card)
    )


def ping(*using: tuple[str, str]) -> Ping:
    return Ping(kvd_id="other", kvd_generation="g", using=using)


def test_a_peer_uses_what_is_here_and_hears_of_the_rest() -> None:
    registry, subscribers = Registry(Events(None, Counter()), settled=0.0), Subscribers()
    engine = ready(registry, "p")
    named = (("p", engine.generation), ("nobody's", "x"), ("p", "an earlier one"))
    assert subscribers.pinged(b"route", ping(*named), registry, A) == (
        ("nobody's", "x"),
        ("p", "an earlier one"),
    )
    assert subscribers.uses(A, "p")
    assert not subscribers.uses(A, "nobody's")
    assert not subscribers.uses(B, "p")
    assert subscribers.users(engine) == ["other"]
    told: list[tuple[bytes, Message]] = []
    subscribers.engine_ended("p", engine.generation, "why", lambda *one: told.append(one))
    assert [route for route, _ in told] == [b"route"]
    assert not subscribers.uses(A, "p")


def test_what_comes_back_after_a_start_and_ends_before_the_next_ping_is_told_of() -> None:
    registry, subscribers = Registry(Events(None, Counter()), settled=time.monotonic() + 60), Subscribers()
    assert not subscribers.pinged(b"route", ping(("p", "g")), registry, A), "it may be back soon"
    told: list[tuple[bytes, Message]] = []
    subscribers.engine_ended("p", "g", "why", lambda *one: told.append(one))
    assert [route for route, _ in told] == [b"route"]


def test_what_may_come_back_has_little_room() -> None:
    registry, subscribers = Registry(Events(None, Counter()), settled=time.monotonic() + 60), Subscribers()
    subscribers.pinged(b"route", ping(*((f"{number:0500d}", "g") for number in range(1000))), registry, A)
    (one,) = subscribers._by_route.values()
    assert 0 < len(one.using) <= EXPECTED_BYTES // 500


def test_what_was_given_just_now_is_in_use_though_a_ping_does_not_say_so() -> None:
    registry, subscribers = Registry(Events(None, Counter()), settled=0.0), Subscribers()
    engine = ready(registry, "p")
    subscribers.described(b"route", "other", engine, A)
    subscribers.pinged(b"route", ping(), registry, A)
    assert subscribers.uses(A, "p")


def test_a_host_has_so_many_connections_and_pushes_out_its_own() -> None:
    registry, subscribers = Registry(Events(None, Counter()), settled=0.0), Subscribers()
    engine = ready(registry, "p")
    subscribers.described(b"another host", "b", engine, B)
    for number in range(10 * MOST_OF_KEY):
        subscribers.pinged(b"%d" % number, ping(("p", engine.generation)), registry, A)
    assert len(subscribers._by_route) == MOST_OF_KEY + 1
    assert subscribers.uses(B, "p")
    subscribers.forget_key(A)
    assert list(subscribers._by_route) == [b"another host"]
    assert list(subscribers._of) == [B]


def test_engines_that_come_up_together_are_told_of_once_to_all_who_take_that() -> None:
    registry, subscribers = Registry(Events(None, Counter()), settled=0.0), Subscribers()
    told: list[tuple[bytes, Message]] = []
    changes = 1

    def changed() -> Message:
        return EnginesChanged(changes=changes, up=changes)

    async def run() -> None:
        nonlocal changes
        subscribers.pinged(b"new", msgspec.structs.replace(ping(), told=True), registry, A)
        subscribers.pinged(b"earlier", ping(), registry, B)
        for _ in range(3):
            changes += 1
            subscribers.engines_changed(changed, lambda *one: told.append(one))
        while not told:  # noqa: ASYNC110 - what is told announces nothing
            await asyncio.sleep(0)
        assert told == [(b"new", EnginesChanged(changes=4, up=4))]
        subscribers.engines_changed(changed, lambda *one: told.append(one))
        while len(told) < 2:  # noqa: ASYNC110 - the same
            await asyncio.sleep(0)

    asyncio.run(run())
