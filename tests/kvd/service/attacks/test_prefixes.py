"""Lies about prefixes: of schedulers here, of kvds elsewhere, and numbers that no answer can hold."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from kvd.wire.frame import Message, decode, encode
from kvd.wire.handshake import EngineDescribed
from kvd.wire.identity import Endpoint
from kvd.wire.limits import MOST
from kvd.wire.prefix import SCHEME_FACT, CheckPrefix, FindPrefix, PrefixFound, PrefixKept
from kvd.wire.prefixes.cache import CacheList, ListCaches
from kvd.wire.prefixes.hints import (
    MOST_HINTED,
    MOST_TAGS,
    EngineHints,
    GetHints,
    HintChange,
    HintsTaken,
    HintsTold,
    TellHints,
)
from kvd.wire.registration import Registered
from tests.support.attacked import assert_unfelled, attack, attacked, attacking
from tests.support.daemons import Daemon, daemons, geometry, reporter, scheduler, wait_for
from tests.support.hostile_peer import card_of, serve
from tests.support.hosts import hosts, speaking
from tests.support.ledgers import record
from tests.support.ports import free_port
from tests.support.prefix_holders import (
    LONG,
    SCHEME,
    Holder,
    found,
    holding,
    introduce,
    question,
    reading,
    sharing,
)


@pytest.fixture
def kvd() -> Iterator[Daemon]:
    with daemons() as (one,):
        yield one


# --- numbers ---


def test_numbers_that_add_up_to_more_than_an_answer_holds_hide_nothing(kvd: Daemon) -> None:
    """Three records of nearly 2**63 bytes: kvd could tell nobody its status any more."""
    large = [
        msgspec.structs.replace(record(number), bytes=MOST, tokens=MOST, prefix=True) for number in range(3)
    ]
    with reporter(kvd) as report:
        report(*large)
        assert kvd.status().counters["transfers.bytes"] == MOST
        assert isinstance(kvd.ask(ListCaches()), CacheList)


def test_reads_of_more_than_an_answer_holds_leave_the_others_to_be_shown(kvd: Daemon) -> None:
    with holding(kvd, sharing("p"), 16) as near, reading(kvd) as asker:
        introduce(kvd, "p")
        for _ in range(3):
            near.tokens = 32
            assert found(asker, msgspec.structs.replace(question(), most=MOST)).tokens == 32
            asked = CheckPrefix(engine_id="p", generation=near.generation, reader="r", bytes=MOST)
            assert asker.call(asked, LONG).result(LONG) == PrefixKept(kept=True)
        caches = kvd.ask(ListCaches())
        assert isinstance(caches, CacheList)
        assert {row.engine_id: row.given.bytes for row in caches.rows} == {"p": MOST, "d": 0}


# --- hints ---


def forget_much(directory: Path, engines: int) -> None:
    """Schedulers that hold nothing, and say that they have just lost as much as one may hold."""
    lost = secrets.token_bytes(MOST_TAGS * 8)
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        context.max_sockets = engines + 8
        for number in range(engines):
            dealer = stack.enter_context(context.socket(zmq.DEALER))
            dealer.linger, dealer.rcvtimeo = 0, 20_000
            dealer.connect(f"ipc://{directory}/kvd.sock")
            name = f"e{number}"
            dealer.send(encode(scheduler(sharing(name)), 1))
            assert isinstance(decode(dealer.recv())[0], Registered)
            for version, dropped in ((1, b""), (2, lost)):
                change = HintChange(
                    version=version, since=version - 1, hash_tokens=16, every=1, dropped=dropped
                )
                dealer.send(encode(TellHints(engine_id=name, change=change), 1 + version))
                assert decode(dealer.recv())[0] == HintsTaken(version=version)


def test_what_engines_say_that_they_lost_takes_no_memory(kvd: Daemon) -> None:
    """200 engines: kvd remembered 100 MiB of what they do not hold."""
    with attacked(kvd) as watch:
        assert attack(forget_much, kvd.directory, 200, seconds=90.0)
    assert_unfelled(watch.verdict(), rss=120 << 20)


def tell_without_end(port: int) -> None:
    """A kvd that answers each question for hints at once: always all, always other ones, one engine many times."""
    card = card_of("p", geometry(), role="both", facts={SCHEME_FACT: SCHEME})
    tags = secrets.token_bytes(MOST_TAGS * 8)

    def answer(message: Message) -> Message | None:
        if isinstance(message, GetHints):
            return HintsTold(engines=tuple(_much(card.generation, tags)))
        return PrefixFound() if isinstance(message, FindPrefix) else None

    serve(port, lambda _: EngineDescribed(card=card, kvd_generation="h"), answer)


def _much(generation: str, tags: bytes) -> Iterator[EngineHints]:
    for number in range(MOST_HINTED):
        added = tags if number < 7 else b""
        change = HintChange(
            version=1 + number, since=0 if number < 7 else number, hash_tokens=16, every=1, added=added
        )
        yield EngineHints(engine_id="p", generation=generation, change=change)


def test_a_kvd_that_tells_hints_without_end_keeps_nobody_waiting(kvd: Daemon) -> None:
    port = free_port()
    with attacking(tell_without_end, port), reading(kvd) as asker:
        introduce(kvd, "p", Endpoint("127.0.0.1", port))
        with attacked(kvd) as watch:
            found(asker, question())
            wait_for(lambda: kvd.status().counters.get("prefixes.hint_answers"))
            time.sleep(3.0)  # the attack's length
        told = kvd.status().counters["prefixes.hint_answers"]
    assert told < 60, f"{told} answers of several megabytes in some seconds"
    assert_unfelled(watch.verdict())


def ask_for_hints(port: int, connections: int, each: int) -> None:
    """Questions for all hints, as many as wait at a time, whose answers are read."""
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        context.max_sockets = connections + 8
        dealers = [stack.enter_context(context.socket(zmq.DEALER)) for _ in range(connections)]
        poller = zmq.Poller()
        for dealer in dealers:
            dealer.linger = 0
            dealer.connect(f"tcp://127.0.0.1:{port}")
            poller.register(dealer, zmq.POLLIN)
        number = 0
        for dealer in dealers:
            for _ in range(each):
                number += 1
                dealer.send(encode(GetHints(), number))
        while True:
            for dealer, _ in poller.poll():
                assert isinstance(dealer, zmq.Socket)
                dealer.recv()
                number += 1
                dealer.send(encode(GetHints(), number))


def test_questions_for_all_hints_keep_nobody_waiting(kvd: Daemon) -> None:
    """Eight full caches, 4 MB an answer, which a host asks for again and again."""
    with contextlib.ExitStack() as stack:
        for number in range(8):
            one = stack.enter_context(holding(kvd, sharing(f"p{number}"), 16))
            added = os.urandom(MOST_TAGS * 8)
            change = HintChange(version=1, since=0, hash_tokens=16, every=1, added=added)
            assert one.tell(change, f"p{number}") == 1
        with attacked(kvd) as watch, attacking(ask_for_hints, kvd.port, 16, 4):
            time.sleep(3.0)  # the attack's length
        assert_unfelled(watch.verdict())


def test_of_the_questions_of_one_connection_one_waits(kvd: Daemon) -> None:
    """A host had thousands wait, and each change had all of them looked at in one turn."""
    with holding(kvd, sharing("p"), 16), zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, 5_000
        dealer.connect(f"tcp://127.0.0.1:{kvd.port}")
        for number in range(1, 401):
            dealer.send(encode(GetHints(), number))
        answered = [decode(dealer.recv()) for _ in range(399)]
        assert {message for message, _ in answered} == {HintsTold()}
        assert {number for _, number in answered} == set(range(1, 400))


# --- answers ---


class Liar(Holder):
    """It tells whatever it is told to."""

    answer = PrefixFound()

    def take(self, message: Message) -> Message | None:
        return self.answer if isinstance(message, FindPrefix) else super().take(message)


@contextlib.contextmanager
def lying(kvd: Daemon, name: str, answer: PrefixFound) -> Iterator[Liar]:
    made = Liar(0)
    made.answer = answer
    with holding(kvd, sharing(name), 0, made):
        yield made


@pytest.mark.parametrize("tokens", [41, 1 << 40, MOST])
@pytest.mark.parametrize("far", [False, True])
def test_who_names_more_tokens_than_were_asked_for_is_not_the_longest(tokens: int, far: bool) -> None:
    with daemons(2) as (here, there):
        where = there if far else here
        endpoint = there.endpoint if far else Endpoint()
        with (
            reading(here) as asker,
            holding(here, sharing("honest"), 32) as honest,
            lying(where, "liar", PrefixFound(tokens=tokens, blocks=((1,),), first_blocks=(0,))),
        ):
            introduce(here, "honest")
            introduce(here, "liar", endpoint)
            answer = found(asker, question())
            assert (answer.tokens, answer.generation) == (32, honest.generation)
            assert here.status().counters["prefixes.found_tokens"] == 32


def test_who_is_busy_and_names_tokens_all_the_same_counts_as_one_who_told(kvd: Daemon) -> None:
    both = PrefixFound(tokens=32, blocks=((1,),), first_blocks=(0,), busy=True)
    with reading(kvd) as asker, lying(kvd, "liar", both):
        introduce(kvd, "liar")
        answer = found(asker, question())
        assert (answer.tokens, answer.busy) == (32, False)
        counters = kvd.status().counters
        assert (counters["prefixes.told"], counters.get("prefixes.busy", 0)) == (1, 0)


def answer_as_another(port: int) -> None:
    """A kvd whose engine is ``p``, and who answers every question for a prefix with an engine of another name."""
    card = card_of("p", geometry(), role="both", facts={SCHEME_FACT: SCHEME})
    named = PrefixFound(tokens=40, engine_id="honest", generation="g", blocks=((1,),), first_blocks=(0,))

    def answer(message: Message) -> Message | None:
        if isinstance(message, GetHints):
            return HintsTold()
        return named if isinstance(message, FindPrefix) else None

    serve(port, lambda _: EngineDescribed(card=card, kvd_generation="h"), answer)


def test_a_kvd_that_names_an_engine_which_was_not_asked_is_not_believed(kvd: Daemon) -> None:
    """A worker would take that engine for the one of that name elsewhere, and give up what it reads of that."""
    port = free_port()
    with (
        attacking(answer_as_another, port),
        reading(kvd) as asker,
        holding(kvd, sharing("honest"), 32) as honest,
    ):
        introduce(kvd, "honest")
        introduce(kvd, "p", Endpoint("127.0.0.1", port))
        answer = found(asker, question())
        assert (answer.tokens, answer.engine_id, answer.generation) == (32, "honest", honest.generation)
        assert kvd.status().counters["prefixes.answers_untrue"] == 1


# --- names of reads ---


def test_a_host_that_asks_under_anothers_name_has_nothing_vouched_for() -> None:
    """It is asked under that name too. The holder went by its last question, whatever the other one had read."""
    with hosts("reader", "holder", "other") as three:
        here, there = three["reader"].daemon, three["holder"].daemon
        with reading(here) as asker, holding(there, sharing("p"), 32) as holder:
            introduce(here, "p", there.endpoint)
            assert found(asker, question()).tokens == 32
            with reading(three["other"].daemon):
                introduce(three["other"].daemon, "p", there.endpoint)
                with speaking(three["other"].pair, three["holder"]) as other:
                    assert other.ask(question()) == PrefixFound(
                        tokens=32,
                        engine_id="p",
                        generation=holder.generation,
                        blocks=((32,),),
                        first_blocks=(0,),
                    )
            asked = CheckPrefix(
                engine_id="p", generation=holder.generation, reader="r", endpoint=there.endpoint
            )
            assert asker.call(asked, LONG).result(LONG) == PrefixKept(kept=True)
            first, second, checked = (
                one.reader for one in holder.heard if isinstance(one, FindPrefix | CheckPrefix)
            )
            assert first == checked != second


def test_who_was_given_no_card_has_no_read_counted() -> None:
    with hosts("holder", "stranger") as two:
        there = two["holder"].daemon
        with (
            holding(there, sharing("p"), 32) as holder,
            speaking(two["stranger"].pair, two["holder"]) as stranger,
        ):
            asked = CheckPrefix(engine_id="p", generation=holder.generation, reader="r", bytes=1000)
            answer = stranger.ask(asked)
            assert isinstance(answer, PrefixKept)
            assert not answer.kept
            assert holder.heard == []
            caches = there.ask(ListCaches())
            assert isinstance(caches, CacheList)
            assert caches.rows[0].given.kept == caches.rows[0].given.lost == 0
