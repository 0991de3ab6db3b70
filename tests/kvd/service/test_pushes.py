"""Pushes over real kvds: who gets what, what is refused for good and what is sent again, and a kvd that dies midway."""

from __future__ import annotations

import itertools
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
import zmq

from kvd.client.errors import RefusedByDaemon, TimedOut
from kvd.client.session import Session
from kvd.wire.event import Event
from kvd.wire.frame import Message, decode, encode
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import RankId
from kvd.wire.push import (
    BlockRun,
    LayersThere,
    PushAnnounce,
    PushDone,
    PushKey,
    PushProgress,
    PushWithdraw,
)
from kvd.wire.registration import RegisterScheduler, RegisterWorker
from kvd.wire.reply import Ok, Refused
from tests.support.daemons import (
    Daemon,
    daemons,
    facts,
    measured,
    process,
    scheduler,
    session,
    wait_for,
    worker,
)

LONG = 60.0
PUSHES = (PushAnnounce, PushWithdraw, PushDone, PushProgress)


@dataclass
class Worker:
    """A worker without memory: its session, and what it was told of pushes. ``answer`` is what it says to them."""

    card: RegisterWorker | RegisterScheduler
    answer: Callable[[Message], Message | None] = lambda _message: Ok()
    told: list[Message] = field(default_factory=list)
    session: Session = field(init=False)

    def heard(self, message: Message) -> Message | None:
        """The session's handler."""
        if not isinstance(message, PUSHES):
            return None
        self.told.append(message)
        return self.answer(message)

    @property
    def transfers(self) -> set[str]:
        """Ids of the transfers it was told of."""
        return {m.key.transfer_id for m in self.told if isinstance(m, PUSHES)}


@dataclass
class Pair:
    """A prefilling engine of two workers and a decoding one of two, at one kvd or two."""

    near: Daemon
    far: Daemon
    prefillers: list[Worker]
    decoders: list[Worker]

    @property
    def generations(self) -> tuple[str, str]:
        """The prefiller's and the decoder's."""
        return (
            self.prefillers[0].session.state.engine_generation,
            self.decoders[0].session.state.engine_generation,
        )

    def key(self, transfer: str = "x", rank: int = 0) -> PushKey:
        """A decoding worker's name for its part of a transfer."""
        return PushKey(
            transfer_id=transfer, prefiller="p", prefiller_endpoint=self.far.endpoint, decoder="d", rank=RankId(rank)
        )  # fmt: skip

    def announce(self, transfer: str = "x", rank: int = 0, blocks: int = 3) -> PushAnnounce:
        """What the decoding worker of that rank announces."""
        return announcement(self.key(transfer, rank), self.generations, blocks)


def announcement(key: PushKey, generations: tuple[str, str], blocks: int = 3) -> PushAnnounce:
    """An announcement of so many blocks of one group."""
    return PushAnnounce(
        key=key, generations=generations, tokens=16 * blocks, computed=0,
        blocks=(BlockRun(0, 0, tuple(range(blocks))),), landing=b"landing", seconds=30.0,
    )  # fmt: skip


def progress(announced: Message, source: int = 0, **what: object) -> PushProgress:
    """What a prefilling worker says to an announcement that reached it."""
    assert isinstance(announced, PushAnnounce)
    there = (LayersThere(group=0, layers=("layer.0",), tokens=announced.tokens),)
    return PushProgress(**{"key": announced.key, "source": RankId(source), "there": there, **what})  # type: ignore[arg-type]


@contextmanager
def pair(settings: str = "", *, kvds: int = 2) -> Iterator[Pair]:
    """The two engines, complete, at kvds with those settings (YAML)."""
    with ExitStack() as stack:
        file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".yaml"))
        file.write(settings)
        file.flush()
        started = stack.enter_context(daemons(kvds, "--config", file.name))
        near, far = started[0], started[-1]
        prefillers, decoders = (
            [Worker(worker(facts(engine, tp=2), rank)) for rank in range(2)] for engine in ("p", "d")
        )
        for kvd, made in ((far, prefillers), (near, decoders)):
            for one in made:
                one.session = stack.enter_context(session(kvd, one.card, one.heard))
            for one in made:
                one.session.wait(lambda s: bool(s.engine_generation), 20)
        yield Pair(near, far, prefillers, decoders)


def refused(answer: Future[Message]) -> Refused:
    """Why a message was refused."""
    error = answer.exception(LONG)
    assert isinstance(error, RefusedByDaemon), error or answer.result()
    return error.refusal


@pytest.mark.parametrize("kvds", [1, 2])
def test_a_push_from_announcement_to_end(kvds: int) -> None:
    seen: list[Event] = []
    with pair(kvds=kvds) as both, both.near.operator() as operator:
        listening = threading.Event()
        stream = operator.events(("push.",), 3.0, lambda on: listening.set() if on else None)
        reader = threading.Thread(target=lambda: seen.extend(stream))
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
            assert told.landing == b"landing"
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


def test_a_message_of_100000_blocks_is_legal_and_one_that_no_peer_would_take_is_refused() -> None:
    with pair() as both:
        assert both.decoders[0].session.deliver("a", both.announce(blocks=100_000)).result(LONG) == Ok()
        (told,) = both.prefillers[1].told
        assert isinstance(told, PushAnnounce)
        assert told.blocks[0].ids == tuple(range(100_000))
    with pair("peer: {max_message_bytes: 100000}") as both:
        answer = refused(both.decoders[0].session.deliver("a", both.announce(blocks=100_000)))
        assert (answer.code, answer.final) == ("KVD-TOO-LARGE", True)
        assert "100000" in answer.message
        assert both.decoders[0].session.deliver("b", both.announce()).result(LONG) == Ok()


# --- what is refused for good ---


def test_another_generation_is_refused_for_good_with_both_values() -> None:
    with pair() as both:
        prefiller, decoder = both.generations
        one = both.decoders[0].session
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
        assert both.near.status().counters["received.push_announce"] == 2
        assert both.far.status().counters["push.refused"] == 2
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


def test_an_unknown_engine_is_refused_for_good_by_a_kvd_that_has_settled() -> None:
    with pair("liveness: {settle_seconds: 0.001}") as both:
        unknown = msgspec.structs.replace(both.key(), prefiller="q")
        answer = refused(both.decoders[0].session.deliver("a", announcement(unknown, both.generations)))
        assert (answer.code, answer.final) == ("KVD-ENGINE-UNKNOWN", True)
        assert "'q'" in answer.message
        assert f"127.0.0.1:{both.far.port}" in answer.message
    with pair("liveness: {settle_seconds: 600}") as both:
        unknown = msgspec.structs.replace(both.key(), prefiller="q")
        answer = refused(both.decoders[0].session.call(announcement(unknown, both.generations), LONG))
        assert (answer.code, answer.final) == ("KVD-ENGINE-UNKNOWN", False)


def test_a_rank_that_the_decoder_does_not_have_is_refused_for_good() -> None:
    with pair() as both:
        key = msgspec.structs.replace(both.key(rank=7), decoder_endpoint=both.near.endpoint)
        answer = refused(
            both.prefillers[0].session.deliver("a", PushProgress(key=key, source=RankId(0), quiet=True))
        )
        assert (answer.code, answer.final) == ("KVD-RANK-UNKNOWN", True)
        assert "tp7" in answer.message


def test_a_worker_speaks_for_itself_alone() -> None:
    with pair() as both, session(both.near, scheduler(facts("d", tp=2))) as other:
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
        bad = [
            msgspec.structs.replace(good, **change)
            for change in (
                {"seconds": float("nan")},
                {"seconds": -1.0},
                {"computed": 49},
                {"computed": -1},
                {"generations": ("", "g")},
                {"key": both.key(transfer="")},
                {"key": both.key(transfer="x" * 10_000)},
            )
        ]
        for announced in bad:
            answer = refused(both.decoders[0].session.deliver("a", announced))
            assert (answer.code, answer.final) == ("KVD-BAD-PUSH", True), announced
        assert not both.prefillers[0].told


def test_nothing_is_passed_on_from_the_peer_socket() -> None:
    with pair() as both, zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        sender.linger, sender.rcvtimeo = 0, 20_000
        sender.connect(f"tcp://127.0.0.1:{both.near.port}")
        sender.send(encode(both.announce(), 3))
        answer, of = decode(sender.recv())
        assert isinstance(answer, Refused)
        assert (answer.code, of) == ("KVD-ENGINE-UNKNOWN", 3)
        assert "received.push_announce" not in both.far.status().counters


def test_without_a_peer_socket_nothing_could_come_back() -> None:
    with daemons(1, "--listen", "") as (alone,), pair() as both:
        one = Worker(worker(facts("alone")))
        with session(alone, one.card) as lonely:
            key = msgspec.structs.replace(both.key(), decoder="alone")
            generations = (both.generations[0], lonely.state.engine_generation)
            answer = refused(lonely.deliver("a", announcement(key, generations)))
            assert (answer.code, answer.final) == ("KVD-NO-WAY-BACK", True)
            assert "peer.listen" in answer.hint


# --- what workers answer ---


def test_one_workers_refusal_is_the_answer_of_them_all_and_is_sent_again_until_none_refuses() -> None:
    with pair() as both:
        answers: list[Message] = [Refused(code="KVD-LATER", message="not yet", hint="wait"), Ok()]
        both.prefillers[1].answer = lambda _m: answers.pop(0) if len(answers) > 1 else answers[0]
        assert both.decoders[0].session.deliver("a", both.announce()).result(LONG) == Ok()
        assert len(both.prefillers[0].told) == len(both.prefillers[1].told) == 2
        both.prefillers[0].answer = lambda _m: Refused(code="KVD-LATER", message="not yet")
        both.prefillers[1].answer = lambda _m: Refused(code="KVD-NEVER", message="no", final=True)
        answer = refused(both.decoders[0].session.deliver("b", both.announce()))
        assert (answer.code, answer.final) == ("KVD-NEVER", True)
        assert "p/tp1: no" in answer.message


def test_a_worker_that_raises_refuses_and_one_that_takes_no_pushes_refuses_for_good() -> None:
    def fail(_message: Message) -> Message:
        raise ValueError("a fault of the handler")

    with pair() as both:
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
            transfer_id="x", prefiller="p", prefiller_endpoint=far.endpoint, decoder="d", rank=RankId(0)
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


# --- a kvd that dies ---


@pytest.mark.parametrize("which", ["near", "far", "both"])
def test_nothing_is_lost_when_a_kvd_is_killed_in_between(which: str) -> None:
    with pair("liveness: {settle_seconds: 600}") as both:
        killed = [kvd for name, kvd in (("near", both.near), ("far", both.far)) if which in (name, "both")]
        one = both.decoders[0].session
        names = [f"t{n}" for n in range(150)]
        futures = [one.deliver(name, both.announce(name)) for name in names[:50]]
        for kvd in killed:
            kvd.kill()
        futures += [one.deliver(name, both.announce(name)) for name in names[50:100]]
        for kvd in killed:
            kvd.start()
        futures += [one.deliver(name, both.announce(name)) for name in names[100:]]
        assert not wait(futures, LONG).not_done
        assert {f.exception() or type(f.result()) for f in futures} == {Ok}
        assert both.prefillers[0].transfers == both.prefillers[1].transfers == set(names)
        back = both.prefillers[1].session
        (announced,) = [
            m for m in both.prefillers[1].told if isinstance(m, PushAnnounce) and m.key.transfer_id == "t149"
        ][-1:]
        assert back.deliver("p", progress(announced, 1)).result(LONG) == Ok()
        assert both.decoders[0].transfers == {"t149"}


def test_progress_is_kept_while_the_decoders_kvd_is_away() -> None:
    with pair() as both:
        assert both.decoders[0].session.deliver("a", both.announce()).result(LONG) == Ok()
        announced = both.prefillers[0].told[0]
        both.near.kill()
        futures = [
            both.prefillers[0].session.deliver(f"{n}", progress(announced, failed=f"{n}")) for n in range(50)
        ]
        both.near.start()
        assert not wait(futures, LONG).not_done
        assert {f.exception() or type(f.result()) for f in futures} == {Ok}
        said = {m.failed for m in both.decoders[0].told if isinstance(m, PushProgress)}
        assert said == {f"{n}" for n in range(50)}


def test_an_engine_whose_workers_are_not_all_back_is_waited_for() -> None:
    with pair("liveness: {settle_seconds: 600}") as both:
        generations, announced = both.generations, both.announce()
        both.far.kill()
        both.prefillers[1].session.close()  # its goodbye reaches nobody
        both.far.start()
        wait_for(lambda: both.far.engines().get("p"))
        answer = wait_for(lambda: partial(both.decoders[0].session.call(announced, LONG)))
        assert not answer.final
        assert "1 of 2 workers" in answer.message
        kept = both.decoders[0].session.deliver("a", announced)
        with pytest.raises(TimeoutError):
            kept.result(0.5)
        late = Worker(both.prefillers[1].card)
        with session(both.far, late.card, late.heard) as again:
            assert kept.result(LONG) == Ok()
            assert again.state.engine_generation == generations[0]
            assert late.transfers == {"x"}


def partial(answer: Future[Message]) -> Refused | None:
    """The refusal of an engine that is not complete; None for another one, as of a link that is not up again yet."""
    refusal = refused(answer)
    return refusal if refusal.code == "KVD-ENGINE-PARTIAL" else None


def test_a_delivery_that_nobody_can_take_ends_after_its_time() -> None:
    with pair() as both:
        both.far.kill()
        kept = both.decoders[0].session.deliver("a", both.announce(), 1.0)
        assert isinstance(kept.exception(LONG), TimedOut)
        assert both.decoders[0].session.counters["deliveries.dropped"] == 1


# --- many at once ---


def test_1000_announcements_at_once_leave_room_for_handshakes() -> None:
    with pair() as both:
        one, other = (d.session for d in both.decoders)
        began = time.monotonic()
        futures = [one.deliver(f"{n}", both.announce(f"{n}", blocks=500)) for n in range(1000)]
        ask = GetPeer(local_engine="d", engine_id="p", endpoint=both.far.endpoint)
        assert isinstance(other.call(ask, LONG).result(LONG), PeerReady)
        measured("handshake among 1000 announcements", time.monotonic() - began)
        assert not wait(futures, LONG).not_done
        measured("1000 announcements to two workers each", time.monotonic() - began)
        assert {f.exception() or type(f.result()) for f in futures} == {Ok}
        assert both.prefillers[0].transfers == both.prefillers[1].transfers == {f"{n}" for n in range(1000)}
        repeats = sum(len(p.told) - 1000 for p in both.prefillers)
        sys.stderr.write(f"measured: told again {repeats}, refused {one.counters['deliveries.refused']}\n")
        wait_for(lambda: both.near.status().gauges["pushes.underway"] == 0)


def test_announcements_to_a_dead_kvd_leave_room_for_handshakes() -> None:
    with pair() as both, session(both.near, worker(facts("beside"))):
        both.far.kill()
        one, other = (d.session for d in both.decoders)
        for n in range(1500):
            one.deliver(f"{n}", both.announce(f"{n}", blocks=500), 5.0)
        ask = GetPeer(local_engine="d", engine_id="beside")
        waits = []
        for _ in range(20):
            began = time.monotonic()
            assert isinstance(other.call(ask, LONG).result(LONG), PeerReady)
            waits.append(time.monotonic() - began)
        measured("slowest of 20 handshakes beside 1500 announcements to nobody", max(waits))
        assert both.near.status().counters["push.refused"] > 0


def test_both_directions_at_once() -> None:
    """Every worker asks and is asked at the same time, so ids of both sides' requests meet."""
    with pair() as both:
        there = [both.announce(f"{n}") for n in range(200)]
        p, d = both.generations
        back = [
            announcement(
                PushKey(
                    transfer_id=f"{n}",
                    prefiller="d",
                    prefiller_endpoint=both.near.endpoint,
                    decoder="p",
                    rank=RankId(0),
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


def test_how_long_it_takes_from_worker_to_worker() -> None:
    with pair() as both:
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
