"""Questions for prefixes: whom they reach, whose answer counts, and who is told nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import pytest

from kvd.client.errors import RefusedByDaemon
from kvd.client.session import KvdSession
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer
from kvd.wire.identity import HERE, Endpoint, EngineFacts
from kvd.wire.prefix import SCHEME_FACT, CheckPrefix, FindPrefix, PrefixFound, PrefixKept
from tests.support.daemons import Daemon, daemons, facts, scheduler, session, worker

LONG = 30.0
SCHEME = "sha256/0"


def sharing(name: str, scheme: str = SCHEME) -> EngineFacts:
    engine = facts(name)
    return msgspec.structs.replace(engine, role="both", facts={**engine.facts, SCHEME_FACT: scheme})


class Holder:
    """An engine that holds ``tokens`` of every prompt, and has kept what ``kept`` says."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.kept = tokens, True
        self.heard: list[Message] = []
        self.generation = ""

    def take(self, message: Message) -> Message | None:
        if isinstance(message, FindPrefix):
            self.heard.append(message)
            return PrefixFound(tokens=self.tokens, blocks=((self.tokens,),), first_blocks=(0,))
        if isinstance(message, CheckPrefix):
            self.heard.append(message)
            return PrefixKept(kept=self.kept)
        return None


@contextlib.contextmanager
def holding(kvd: Daemon, engine: EngineFacts, tokens: int) -> Iterator[Holder]:
    made = Holder(tokens)
    with session(kvd, worker(engine)) as first, session(kvd, scheduler(engine), made.take):
        made.generation = first.wait(lambda s: bool(s.engine_generation), LONG).engine_generation
        yield made


@contextlib.contextmanager
def reading(kvd: Daemon, name: str = "d") -> Iterator[KvdSession]:
    """The scheduler of an engine that may ask."""
    engine = sharing(name)
    with session(kvd, worker(engine)), session(kvd, scheduler(engine)) as made:
        made.wait(lambda s: bool(s.engine_generation), LONG)
        yield made


def question(scheme: str = SCHEME, engine: str = "d") -> FindPrefix:
    return FindPrefix(
        local_engine=engine, reader="r", scheme=scheme, hash_tokens=16, hashes=b"h" * 64, most=40, beyond=3
    )


def introduce(kvd: Daemon, name: str, endpoint: Endpoint = HERE) -> None:
    kvd.ask(GetPeer(local_engine="d", engine_id=name, endpoint=endpoint))


def found(asker: KvdSession, asked: FindPrefix) -> PrefixFound:
    answer = asker.call(asked, LONG).result(LONG)
    assert isinstance(answer, PrefixFound)
    return answer


@pytest.fixture
def kvds() -> Iterator[list[Daemon]]:
    with daemons(2) as two:
        yield two


def test_the_longest_prefix_is_found_on_this_host_or_another(kvds: list[Daemon]) -> None:
    here, there = kvds
    with (
        reading(here) as asker,
        holding(here, sharing("near"), 16) as near,
        holding(there, sharing("far"), 32) as far,
    ):
        introduce(here, "near")
        introduce(here, "far", there.endpoint)
        expected = PrefixFound(
            tokens=32, engine_id="far", generation=far.generation, endpoint=there.endpoint,
            blocks=((32,),), first_blocks=(0,),
        )  # fmt: skip
        assert found(asker, question()) == expected
        assert near.heard == far.heard == [question()]
        far.tokens = 16
        nearest = found(asker, question())
        assert (nearest.engine_id, nearest.endpoint, nearest.generation) == ("near", HERE, near.generation)


def test_an_engine_that_was_not_introduced_or_hashes_otherwise_is_not_asked(kvds: list[Daemon]) -> None:
    here, there = kvds
    with (
        reading(here) as asker,
        holding(there, sharing("stranger"), 32) as stranger,
        holding(there, sharing("other", "sha256/1"), 32) as other,
        holding(there, facts("off"), 32) as off,
    ):
        for name in ("other", "off"):
            introduce(here, name, there.endpoint)
        assert found(asker, question()) == PrefixFound()
        assert stranger.heard == other.heard == off.heard == []


def test_a_holder_that_says_nothing_costs_no_answer(kvds: list[Daemon]) -> None:
    """Nor one that has gone."""
    here, there = kvds
    with reading(here) as asker, holding(here, sharing("near"), 16):
        introduce(here, "near")
        with holding(there, sharing("far"), 32):
            introduce(here, "far", there.endpoint)
            assert found(asker, question()).engine_id == "far"
            there.kill()
            assert found(asker, question()).engine_id == "near"


def test_only_the_scheduler_of_an_engine_asks_for_it(kvds: list[Daemon]) -> None:
    here, _ = kvds
    with reading(here) as asker, reading(here, "e"):
        error = asker.call(question(engine="e"), LONG).exception(LONG)
        assert isinstance(error, RefusedByDaemon)
        assert error.refusal.code == "KVD-NOT-OWNER"
    assert here.ask_refused(question()).code == "KVD-NOT-REGISTERED"


def test_a_worker_hears_whether_the_holder_kept_it(kvds: list[Daemon]) -> None:
    here, there = kvds
    with session(here, worker(sharing("d"))) as reader, holding(there, sharing("far"), 32) as far:
        asked = CheckPrefix(engine_id="far", generation=far.generation, reader="r", endpoint=there.endpoint)
        assert reader.call(asked, LONG).result(LONG) == PrefixKept(kept=True)
        assert far.heard == [asked]
        far.kept = False
        assert reader.call(asked, LONG).result(LONG) == PrefixKept(kept=False)
        before = reader.call(msgspec.structs.replace(asked, generation="before"), LONG).result(LONG)
        assert isinstance(before, PrefixKept)
        assert not before.kept
    assert here.ask_refused(asked).code == "KVD-NOT-REGISTERED"
