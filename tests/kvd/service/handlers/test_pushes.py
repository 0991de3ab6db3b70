"""Pushes over real kvds: who gets what, what is refused for good and what is sent again, and a kvd that dies midway."""

from __future__ import annotations

import itertools
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import msgspec
import pytest
import zmq

from kvd.geometry.rank import Rank
from kvd.service.handlers.pushes import MOST_PUSHED
from kvd.wire.event import KvdEvent
from kvd.wire.frame import Message, decode, encode
from kvd.wire.push import (
    BlockRun,
    PushAnnounce,
    PushDone,
    PushKept,
    PushKey,
    PushProgress,
    PushWithdraw,
)
from kvd.wire.reply import Ok, Refused
from tests.support.daemons import (
    daemons,
    facts,
    measured,
    process,
    scheduler,
    session,
    wait_for,
    worker,
)
from tests.support.rigs.pushes import (
    LONG,
    Pair,
    Worker,
    accept,
    announcement,
    pair,
    progress,
    refused,
)


@pytest.fixture(scope="module")
def lasting() -> Iterator[Pair]:
    """Two engines at two kvds that never settle, for tests that leave them as they were."""
    with pair("liveness: {settle_seconds: 600}") as made:
        yield made


@pytest.fixture
def both(lasting: Pair) -> Pair:
    """The lasting pair; all of its workers say Ok to everything, and were told nothing yet."""
    for one in (*lasting.prefillers, *lasting.decoders):
        one.answer = accept
        one.told.clear()
    return lasting


def test_a_scheduler_tells_its_own_workers_that_a_push_is_complete(both: Pair) -> None:
    said = PushKept(engine_id="p", transfer_id="x", request_id="r")
    with session(both.far, scheduler(facts("p", tp=2))) as ours:
        assert ours.call(said, LONG).result(LONG) == Ok()
    wait_for(lambda: all(one.told == [said] for one in both.prefillers))
    assert not any(one.told for one in both.decoders)
    assert refused(both.prefillers[0].session.call(said, LONG)).code == "KVD-NOT-OWNER"


@pytest.mark.parametrize("kvds", [1, 2])
def test_a_push_from_announcement_to_end(kvds: int) -> None:
    seen: list[KvdEvent] = []
    with pair(kvds=kvds) as both, both.near.operator() as operator:
        listening = threading.Event()
        stream = operator.events(("push.",), LONG, lambda on: listening.set() if on else None)
        reader = threading.Thread(target=lambda: seen.extend(itertools.islice(stream, 3)))
        reader.start()
        assert listening.wait(10)
        decoder = both.decoders[1]
        assert decoder.session.deliver("a", both.announce(rank=1)).result(LONG) == Ok()
        for prefiller in both.prefillers:
            (told,) = prefiller.told
            assert isinstance(told, PushAnnounce)
            assert told.key.decoder_endpoint == both.near.endpoint
            assert told.key == msgspec.structs.replace(both.key(rank=1), decoder_endpoint=both.near.endpoint)
            assert told.blocks == both.announce().blocks
            assert told.window == b"landing"
        for source, prefiller in enumerate(both.prefillers):
            said = progress(prefiller.told[0], source)
            assert prefiller.session.deliver("p", said).result(LONG) == Ok()
            assert decoder.told[-1] == said
        failed = progress(both.prefillers[0].told[0], 0, failed="no more")
        assert both.prefillers[0].session.deliver("f", failed).result(LONG) == Ok()
        withdraw = PushWithdraw(key=both.key(rank=1), generation=both.generations[0])
        assert decoder.session.deliver("w", withdraw).result(LONG) == Ok()
        assert decoder.session.deliver("e", PushDone(key=both.key(rank=1))).result(LONG) == Ok()
        for prefiller in both.prefillers:
            assert [type(m) for m in prefiller.told] == [PushAnnounce, PushWithdraw, PushDone]
        assert len(decoder.told) == 3
        assert both.decoders[0].told == []
        for kvd in (both.near, both.far):
            counters = kvd.status().counters
            counted = {
                name: counters.get(f"push.{name}")
                for name in ("announced", "withdrawn", "done", "progress", "failed")
            }
            assert counted == {"announced": 1, "withdrawn": 1, "done": 1, "progress": 3, "failed": 1}
            assert "push.refused" not in counters
            assert kvd.status().gauges["pushes.underway"] == 0
        reader.join()
    mine, others = {"engine": "d", "peer": "p"}, {"engine": "p", "peer": "d"}
    assert [e.kind for e in seen] == ["push.announced", "push.failed", "push.withdrawn"]
    for event in seen:
        assert event.subject == "x"
        assert event.detail["rank"] == "tp1"
        parties = {name: event.detail[name] for name in ("engine", "peer")}
        assert parties == (others if kvds == 1 and event.kind == "push.failed" else mine)
    assert (seen[1].detail["source"], seen[1].detail["cause"]) == ("tp0", "no more")


def test_a_message_of_100000_blocks_is_legal_and_one_that_no_peer_would_take_is_refused(both: Pair) -> None:
    assert both.decoders[0].session.deliver("a", both.announce(blocks=100_000)).result(LONG) == Ok()
    (told,) = both.prefillers[1].told
    assert isinstance(told, PushAnnounce)
    assert told.blocks[0].ids == tuple(range(100_000))
    endless_group = BlockRun(0, 0, (), ((0, MOST_PUSHED // 4),))
    five = tuple(msgspec.structs.replace(endless_group, group=group) for group in range(5))
    odd = (BlockRun(0, 0, (), packed=bytes(4)),)
    for endless in (five, (endless_group, endless_group), odd):
        answer = refused(
            both.decoders[0].session.deliver("b", msgspec.structs.replace(both.announce(), blocks=endless))
        )
        assert (answer.code, answer.final) == ("KVD-BAD-PUSH", True)
    with pair("peer: {max_message_bytes: 100000}") as narrow:
        one = narrow.decoders[0].session
        answer = refused(one.deliver("a", narrow.announce(blocks=100_000)))
        assert (answer.code, answer.final) == ("KVD-TOO-LARGE", True)
        assert "100000" in answer.message
        assert one.deliver("b", narrow.announce()).result(LONG) == Ok()


# --- what is refused for good ---


def test_another_generation_is_refused_for_good_with_both_values(both: Pair) -> None:
    prefiller, decoder = both.generations
    one = both.decoders[0].session
    before = Counter(both.far.status().counters)
    stale = msgspec.structs.replace(both.announce(), generations=("older", decoder))
    answer = refused(one.deliver("a", stale))
    assert (answer.code, answer.final) == ("KVD-PEER-GENERATION", True)
    assert "older" in answer.message
    assert prefiller in answer.message
    answer = refused(one.deliver("b", PushWithdraw(key=both.key(), generation="older")))
    assert (answer.code, answer.final) == ("KVD-PEER-GENERATION", True)
    own = msgspec.structs.replace(both.announce(), generations=(prefiller, "older"))
    answer = refused(one.deliver("c", own))
    assert (answer.code, answer.final) == ("KVD-OWN-GENERATION", True)
    assert "older" in answer.message
    assert decoder in answer.message
    after = both.far.status().counters
    assert after["push.refused"] - before["push.refused"] == 2
    assert not both.prefillers[0].told


def test_an_engine_that_ended_is_refused_for_good() -> None:
    with pair() as both:
        both.prefillers[1].session.close()
        answer = refused(both.decoders[0].session.deliver("a", both.announce()))
        assert (answer.code, answer.final) == ("KVD-ENGINE-PARTIAL", True)
        assert "1 of 2 workers" in answer.message
        both.prefillers[0].session.close()
        answer = refused(both.decoders[0].session.deliver("b", PushDone(key=both.key())))
        assert (answer.code, answer.final) == ("KVD-ENGINE-GONE", True)


def test_an_unknown_engine_is_refused_for_good_by_a_kvd_that_has_settled(both: Pair) -> None:
    unknown = announcement(msgspec.structs.replace(both.key(), prefiller="q"), both.generations)
    answer = refused(both.decoders[0].session.call(unknown, LONG))
    assert (answer.code, answer.final) == ("KVD-ENGINE-UNKNOWN", False)
    assert "'q'" in answer.message
    assert f"127.0.0.1:{both.far.port}" in answer.message
    with pair("liveness: {settle_seconds: 0.001}", kvds=1) as settled:
        unknown = announcement(msgspec.structs.replace(settled.key(), prefiller="q"), settled.generations)
        answer = refused(settled.decoders[0].session.deliver("a", unknown))
        assert (answer.code, answer.final) == ("KVD-ENGINE-UNKNOWN", True)


def test_a_rank_that_the_decoder_does_not_have_is_refused_for_good(both: Pair) -> None:
    key = msgspec.structs.replace(both.key(rank=7), decoder_endpoint=both.near.endpoint)
    answer = refused(
        both.prefillers[0].session.deliver("a", PushProgress(key=key, source=Rank(0), quiesced=True))
    )
    assert (answer.code, answer.final) == ("KVD-RANK-UNKNOWN", True)
    assert "tp7" in answer.message


def test_a_worker_speaks_for_itself_alone(both: Pair) -> None:
    with session(both.near, scheduler(facts("d", tp=2))) as other:
        for sender in (both.decoders[1].session, other):
            answer = refused(sender.deliver("a", both.announce(rank=0)))
            assert (answer.code, answer.final) == ("KVD-NOT-OWNER", True)
            assert "d/tp0" in answer.message
        announced = both.announce()
        assert (
            refused(both.prefillers[1].session.deliver("b", progress(announced, 0))).code == "KVD-NOT-OWNER"
        )
        assert both.near.ask_refused(announced).code == "KVD-NOT-REGISTERED"
        assert not both.prefillers[0].told


def test_an_announcement_that_makes_no_sense_is_refused_for_good() -> None:
    with pair(kvds=1) as both:
        good = both.announce()
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"seconds": float("nan")}, "KVD-WIRE-MALFORMED"),
            ({"seconds": -1.0}, "KVD-BAD-PUSH"),
            ({"seconds": 1e6}, "KVD-BAD-PUSH"),
            ({"computed": 49}, "KVD-BAD-PUSH"),
            ({"computed": -1}, "KVD-WIRE-MALFORMED"),
            ({"generations": ("", "g")}, "KVD-BAD-PUSH"),
            ({"key": both.key(transfer="")}, "KVD-BAD-PUSH"),
            ({"key": both.key(transfer="x" * 10_000)}, "KVD-WIRE-MALFORMED"),
        ]
        for change, code in wrong:
            announced = msgspec.structs.replace(good, **change)
            answer = refused(both.decoders[0].session.deliver("a", announced))
            assert (answer.code, answer.final) == (code, True), announced
        assert not both.prefillers[0].told


def test_nothing_is_passed_on_from_the_peer_socket(both: Pair) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        sender.linger, sender.rcvtimeo = 0, 20_000
        sender.connect(f"tcp://127.0.0.1:{both.near.port}")
        before = both.far.status().counters.get("received.push_announce")
        sender.send(encode(both.announce(), 3))
        answer, of = decode(sender.recv())
        assert isinstance(answer, Refused)
        assert (answer.code, of) == ("KVD-ENGINE-UNKNOWN", 3)
        assert both.far.status().counters.get("received.push_announce") == before


def test_without_a_peer_socket_nothing_could_come_back(both: Pair) -> None:
    with daemons(1, "--listen", "") as (alone,):
        one = Worker(worker(facts("alone")))
        with session(alone, one.card) as lonely:
            key = msgspec.structs.replace(both.key(), decoder="alone")
            generations = (both.generations[0], lonely.state.engine_generation)
            answer = refused(lonely.deliver("a", announcement(key, generations)))
            assert (answer.code, answer.final) == ("KVD-NO-WAY-BACK", True)
            assert "peer.listen" in answer.hint


# --- what workers answer ---


def test_one_workers_refusal_is_the_answer_of_them_all_and_is_sent_again_until_none_refuses(
    both: Pair,
) -> None:
    answers: list[Message] = [Refused(code="KVD-LATER", message="not yet", hint="wait"), Ok()]
    both.prefillers[1].answer = lambda _m: answers.pop(0) if len(answers) > 1 else answers[0]
    assert both.decoders[0].session.deliver("a", both.announce()).result(LONG) == Ok()
    assert len(both.prefillers[0].told) == len(both.prefillers[1].told) == 2
    both.prefillers[0].answer = lambda _m: Refused(code="KVD-LATER", message="not yet")
    both.prefillers[1].answer = lambda _m: Refused(code="KVD-NEVER", message="no", final=True)
    answer = refused(both.decoders[0].session.deliver("b", both.announce()))
    assert (answer.code, answer.final) == ("KVD-NEVER", True)
    assert "p/tp1: no" in answer.message


def test_a_worker_that_raises_refuses_and_one_that_takes_no_pushes_refuses_for_good(both: Pair) -> None:
    def fail(_message: Message) -> Message:
        raise ValueError("a fault of the handler")

    both.prefillers[1].answer = fail
    answer = refused(both.decoders[0].session.call(both.announce(), LONG))
    assert (answer.code, answer.final) == ("KVD-CLIENT-ERROR", False)
    assert "p/tp1: ValueError: a fault of the handler" in answer.message
    both.prefillers[1].answer = lambda _m: None
    answer = refused(both.decoders[0].session.deliver("a", both.announce()))
    assert (answer.code, answer.final) == ("KVD-NOT-TAKEN", True)
    assert "push_announce" in answer.message


def test_a_stopped_worker_is_waited_for_a_bounded_time_and_later_not_at_all() -> None:
    with daemons(2) as (near, far), process(far, "p") as child, session(near, worker(facts("d"))) as one:
        generation = wait_for(lambda: far.engines()["p"].generation)
        key = PushKey(
            transfer_id="x", prefiller="p", prefiller_endpoint=far.endpoint, decoder="d", rank=Rank(0)
        )
        said = announcement(key, (generation, one.state.engine_generation))
        child.send_signal(signal.SIGSTOP)
        answer = refused(one.call(said, LONG))
        assert (answer.code, answer.final) == ("KVD-WORKER-AWAY", False)
        assert "p/tp0" in answer.message
        wait_for(lambda: far.workers()[0].state == "silent")
        answer = refused(one.call(said, LONG))
        assert (answer.code, answer.final) == ("KVD-WORKER-AWAY", False)
        assert "silent" in answer.message


def test_a_request_that_is_repeated_while_it_is_answered_is_not_begun_again(both: Pair) -> None:
    go_on, asked = threading.Event(), threading.Event()

    def slow(_message: Message) -> Message:
        asked.set()
        assert go_on.wait(LONG)
        return Ok()

    both.prefillers[0].answer = slow
    before = both.far.status().counters.get("received.repeated", 0)
    with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        sender.linger, sender.rcvtimeo = 0, 20_000
        sender.connect(f"tcp://127.0.0.1:{both.far.port}")
        sender.send(encode(both.announce(), 3))
        assert asked.wait(LONG)
        sender.send(encode(both.announce(), 3))
        wait_for(lambda: both.far.status().counters.get("received.repeated", 0) > before)
        go_on.set()
        assert decode(sender.recv()) == (Ok(), 3)
        assert len(both.prefillers[0].told) == 1
        sender.send(encode(both.announce(), 3))
        assert decode(sender.recv()) == (Ok(), 3)
        assert len(both.prefillers[0].told) == 2


def test_both_directions_at_once(both: Pair) -> None:
    """Every worker asks and is asked at the same time, so ids of both sides' requests meet."""
    there = [both.announce(f"{n}") for n in range(200)]
    p, d = both.generations
    back = [
        announcement(
            PushKey(
                transfer_id=f"{n}",
                prefiller="d",
                prefiller_endpoint=both.near.endpoint,
                decoder="p",
                rank=Rank(0),
            ),
            (d, p),
        )
        for n in range(200)
    ]
    futures = list(
        itertools.chain.from_iterable(
            (both.decoders[0].session.deliver(f"{n}", a), both.prefillers[0].session.deliver(f"{n}", b))
            for n, (a, b) in enumerate(zip(there, back, strict=True))
        )
    )
    assert not wait(futures, LONG).not_done
    assert {f.exception() or type(f.result()) for f in futures} == {Ok}
    for one in (*both.prefillers, *both.decoders):
        assert one.transfers == {f"{n}" for n in range(200)}


def test_how_long_it_takes_from_worker_to_worker(both: Pair) -> None:
    at: dict[str, float] = {}

    def arrived(message: Message) -> Message:
        assert isinstance(message, PushProgress)
        at[message.failed] = time.monotonic()
        return Ok()

    assert both.decoders[0].session.deliver("a", both.announce()).result(LONG) == Ok()
    both.decoders[0].answer = arrived
    announced, sender = both.prefillers[0].told[0], both.prefillers[0].session
    one_way, round_trips = [], []
    for n in range(200):
        began = time.monotonic()
        assert sender.deliver("p", progress(announced, failed=f"{n}")).result(LONG) == Ok()
        round_trips.append(time.monotonic() - began)
        one_way.append(at[f"{n}"] - began)
    measured("worker to worker over two kvds, median", statistics.median(one_way))
    measured("and answered, median", statistics.median(round_trips))
    assert len(at) == 200
