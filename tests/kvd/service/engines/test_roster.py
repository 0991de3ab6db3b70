"""Clients and engines: who is remembered for how long, how many of whom are taken, and what is counted."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.service.config import LeaseSettings
from kvd.service.engines import lease_room
from kvd.service.engines import leases as lease_module
from kvd.service.engines import registry as registry_module
from kvd.service.engines import roster as roster_module
from kvd.service.engines.local_engine import Client
from kvd.service.engines.outcome_counts import OutcomeCounts
from kvd.service.engines.registry import Registry
from kvd.service.engines.tombstones import Tombstones
from kvd.service.errors import RequestRefused
from kvd.service.sockets.events import Events
from kvd.shown import MAX_NAMES
from kvd.wire.frame import Message
from kvd.wire.lease import LeaseClosed
from kvd.wire.registration import OpenLease
from tests.support.daemons import facts, worker


def made() -> Registry:
    return Registry(Events(None, Counter()), settled=0.0)


def client(engine: str, incarnation: str = "", uid: int = 1, process: int = 7, **more: object) -> Client:
    name = incarnation or f"i-{engine}"
    return Client(
        "scheduler",
        facts(engine),
        name,
        process,
        name.encode(),
        uid=uid,
        process=process,
        **more,  # type: ignore[arg-type]
    )


def test_of_each_user_so_many_of_the_gone_are_remembered() -> None:
    gone = Tombstones(3)
    for number in range(5):
        gone.add(f"a{number}", 1)
    gone.add("b", 2)
    assert set(gone.forgotten(0.0)) == {"a0", "a1"}
    assert list(gone.forgotten(0.0)) == []
    assert list(gone.forgotten(time.time() + 1)) == ["a2", "a3", "a4", "b"]


def test_who_is_back_is_not_forgotten() -> None:
    gone = Tombstones(1)
    gone.add("a", 1)
    gone.add("b", 1)
    gone.discard("a")
    gone.discard("b")
    assert list(gone.forgotten(time.time() + 1)) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from("xyz"), st.sampled_from((1, 2)),
            st.sampled_from(("register", "end", "silence", "hear", "forget")),
        ),
        max_size=40,
    )
)  # fmt: skip
def test_what_is_counted_is_what_is_there(steps: list[tuple[str, str, int, str]]) -> None:
    registry = made()
    for engine, incarnation, uid, what in steps:
        known = registry.clients.get(incarnation)
        try:
            if what == "register":
                registry.register(client(engine, incarnation, uid, process=uid))
            elif what == "forget":
                registry.forget(time.time() + 1)
            elif known is not None and what == "end":
                registry.end(known, "it ended")
            elif known is not None and what == "silence":
                registry.silence(known, "not heard")
            elif known is not None:
                registry.sign_of_life(incarnation, incarnation.encode())
        except RequestRefused:
            pass
        there = Counter(f"{c.kind}s.{c.state}" for c in registry.clients.values())
        assert registry.roster.counts.of == there
        assert registry.counts.of == Counter(f"engines.{e.state}" for e in registry.engines.values())
        assert registry.roster.living_of.of == Counter(
            c.uid for c in registry.clients.values() if c.state != "gone"
        )
        assert {e.facts.engine_id for e in registry.engines.values() if e.alive} == {
            c.engine.engine_id for c in registry.clients.values() if c.state != "gone"
        }


def test_more_clients_of_a_user_than_may_be_are_refused_and_another_user_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roster_module, "MOST_CLIENTS_OF_UID", 3)
    monkeypatch.setattr(roster_module, "MOST_CLIENTS", 5)
    registry = made()
    for number in range(3):
        registry.register(client(f"e{number}"))
    with pytest.raises(RequestRefused, match="uid 1 has 3 workers and schedulers, at most 3") as error:
        registry.register(client("e3"))
    assert error.value.code == "KVD-TOO-MANY"
    registry.register(client("e0"))  # who is here already says it again
    for number in range(2):
        registry.register(client(f"f{number}", uid=2))
    with pytest.raises(RequestRefused, match="all users have 5"):
        registry.register(client("f2", uid=2))
    registry.end(registry.clients["i-e0"], "it ended")
    registry.register(client("e3"))


def test_more_engines_of_a_user_than_may_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MOST_ENGINES_OF_UID", 2)
    registry = made()
    for number in range(2):
        registry.register(client(f"e{number}"))
    with pytest.raises(RequestRefused, match="uid 1 has 2 engines, at most 2"):
        registry.register(client("e2"))
    registry.register(client("e2", uid=2))
    registry.end(registry.clients["i-e0"], "it ended")
    registry.register(client("e2-again"))
    with pytest.raises(RequestRefused, match="at most 2"):
        registry.register(client("e0", "another"))


def test_cards_of_a_user_take_so_many_bytes_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster_module, "MOST_BYTES_OF_UID", 100)
    monkeypatch.setattr(roster_module, "MOST_BYTES", 150)
    registry = made()
    registry.register(client("e0", size=60))
    registry.register(client("e1", size=40))
    refused = "whose card has 1 bytes, is not taken: uid 1 has 100 bytes of cards, at most 100"
    with pytest.raises(RequestRefused, match=refused) as error:
        registry.register(client("e2", size=1))
    assert error.value.code == "KVD-TOO-MANY"
    registry.register(client("e0", size=60))
    with pytest.raises(RequestRefused, match="whose card has 61 bytes"):
        registry.register(client("e0", size=61))  # it is here already, and may not grow
    with pytest.raises(RequestRefused, match="all users have 100 bytes of cards"):
        registry.register(client("f", uid=2, size=51))
    registry.register(client("f", uid=2, size=50))
    registry.end(registry.clients["i-e0"], "it ended")
    assert registry.roster.bytes_of.of == {1: 40, 2: 50}
    registry.register(client("e2", size=60))


def test_who_is_gone_keeps_no_card_and_an_engine_no_large_facts() -> None:
    registry = made()
    large = msgspec.structs.replace(facts("e"), facts={"weights": "w" * registry_module.LARGE_BYTES})
    card = worker(large, 0, "w").card
    registry.register(Client("worker", large, "w", 7, b"w", rank=card.rank, card=card, uid=1, process=7))
    registry.end(registry.clients["w"], "it ended")
    gone = registry.clients["w"]
    assert gone.card is not None
    assert (gone.card.geometry, gone.card.metadata, gone.card.engine.facts) == (b"", b"", {})
    assert registry.engines["e"].facts.facts == {}


def test_request_ids_of_a_users_leases_take_so_many_bytes_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease_room, "MOST_BYTES_OF_UID", 3000)
    wide = "\U0001f600" * 250

    async def work() -> None:
        leases = lease_module.LeaseTable(
            LeaseSettings(), Events(None, Counter()), OutcomeCounts(), _nothing, _never
        )
        owner = client("e")
        for name in "ab":
            leases.open(owner, (OpenLease(name + wide, 60.0),))
        with pytest.raises(RequestRefused, match="bytes of request ids, at most 3000 are kept"):
            leases.open(owner, (OpenLease("c" + wide, 60.0),))
        leases.closed(LeaseClosed(engine_id="e", request_id="a" + wide, end="released"))
        leases.open(owner, (OpenLease("c" + wide, 60.0),))
        leases.close()

    asyncio.run(work())


def test_a_user_keeps_so_many_leases_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_room, "MAX_OPEN_OF_UID", 3)
    monkeypatch.setattr(lease_room, "MAX_OPEN", 5)

    async def work() -> None:
        events = Events(None, Counter())
        leases = lease_module.LeaseTable(LeaseSettings(), events, OutcomeCounts(), _nothing, _never)
        one, two = client("e"), client("f", uid=2)

        def several(*names: str) -> tuple[OpenLease, ...]:
            return tuple(OpenLease(name, 60.0) for name in names)

        leases.open(one, several("a", "b", "c"))
        leases.open(one, several("a", "b", "c"))  # said again
        with pytest.raises(RequestRefused, match="opens 1 leases: uid 1 has 3") as error:
            leases.open(one, several("d"))
        assert error.value.code == "KVD-TOO-MANY"
        leases.open(two, several("a", "b"))
        with pytest.raises(RequestRefused, match="all users have 5"):
            leases.open(two, several("c"))
        leases.closed(LeaseClosed(engine_id="e", request_id="a", end="released"))
        leases.present(one, several("b", "c", "d", "e", "f"))
        assert leases.count("e") == 3
        assert events.counters["leases.not_kept"] == 2
        leases.close()

    asyncio.run(work())


def _nothing(*_: object) -> None:
    pass


async def _never(*_: object) -> Message:
    raise TimeoutError


def test_a_refusal_is_small_however_many_engines_there_are() -> None:
    registry = made()
    for number in range(1000):
        registry.register(client(f"engine-{number:04}"))
    refusal = registry.not_ready("nobody")
    assert refusal.message.endswith(f"and {1000 - MAX_NAMES} more")
    assert len(refusal.message) < 500


def test_an_engine_of_another_user_begins_anew_once_the_first_ones_is_gone() -> None:
    forgotten = []

    class Watching(registry_module.Unwatched):
        def engine_forgotten(self, engine: object) -> None:
            forgotten.append(engine)

    registry = made()
    registry.watcher = Watching()
    first = registry.register(client("e"))
    registry.end(registry.clients["i-e"], "it ended", ended=True)
    again = registry.register(client("e", "second"))
    assert again is first, "of the same user it is the same engine"
    registry.end(registry.clients["second"], "it ended", ended=True)
    other = registry.register(client("e", "third", uid=2))
    assert other is not first
    assert (forgotten, other.uid) == ([first], 2)
    with pytest.raises(RequestRefused) as error:
        registry.register(client("f", "second", uid=2))
    assert error.value.code == "KVD-NOT-OWNER"


@pytest.mark.parametrize(
    ("known", "comes", "taken"),
    [
        ((1, 7), (1, 7), True),
        ((1, 7), (1, 8), False),
        ((1, 7), (2, 7), False),
        ((1, 0), (1, 8), True),
        ((1, 7), (1, 0), True),
        ((1, 0), (2, 0), False),
        ((-1, 0), (-1, 0), True),
        ((1, 0), (-1, 0), False),
    ],
)
def test_whose_incarnation_it_is(known: tuple[int, int], comes: tuple[int, int], taken: bool) -> None:
    """(uid, process), 0 for a process of another PID namespace."""
    registry = made()
    registry.register(client("e", "i", *known))
    if taken:
        registry.register(client("e", "i", *comes))
        return
    with pytest.raises(RequestRefused) as error:
        registry.register(client("e", "i", *comes))
    assert error.value.code == "KVD-NOT-OWNER"
