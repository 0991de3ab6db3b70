"""Cards that are untrue, that nobody can plan, or that are larger than a message: kvd refuses them and goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest
import zmq

from kvd.client.session import KvdSession
from kvd.geometry.codec import encode_worker
from kvd.geometry.model import Axis, Field, Group, Layer, Page, Region, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.service.peers.comparer.messages import CPU_SECONDS
from kvd.wire.frame import Message, decode, encode
from kvd.wire.handshake import DescribeEngine, EngineDescribed, GetPeer, PeerReady
from kvd.wire.identity import Endpoint
from kvd.wire.registration import RegisterWorker
from tests.support.attacked import assert_unfelled, attacked, attacking
from tests.support.daemons import (
    Daemon,
    daemons,
    facts,
    geometry,
    measured,
    scheduler,
    session,
    wait_for,
    worker,
)
from tests.support.hostile_peer import demanding_engines, lying, too_large_at_first
from tests.support.ports import free_port

LAYERS = 16
CARDS = 8
CARD_LAYERS = 1000
"""As many as a card may have. Those that the local engine has too take seconds each."""
LONG = 60.0


def layered(blocks: int = 8) -> bytes:
    """A worker's geometry with `LAYERS` layers of blocks of 16 tokens."""
    axes = (Axis("head", 0, 1, 1, 64), Axis("token", 0, 16, 1, 4))
    page = Page(64, (Field("k", "float32", 4, 0, axes, (("head", 1), ("token", 16))),))
    layers = tuple(Layer(f"layer.{n}", page, 0, n * 64 * blocks, 64) for n in range(LAYERS))
    region = Region(0x10000, 64 * blocks * LAYERS)
    return encode_worker(WorkerGeometry(Rank(), blocks, (region,), (Group(0, "full", 16, layers),)))


def with_geometry(engine_id: str, document: bytes) -> RegisterWorker:
    made = worker(facts(engine_id))
    return msgspec.structs.replace(made, card=msgspec.structs.replace(made.card, geometry=document))


@contextmanager
def asker(kvd: Daemon, document: bytes) -> Iterator[KvdSession]:
    """A worker of engine ``d``, which is complete."""
    with session(kvd, with_geometry("d", document)) as one:
        one.wait(lambda state: bool(state.engine_generation), LONG)
        yield one


def question(engine_id: str, port: int) -> GetPeer:
    return GetPeer(local_engine="d", engine_id=engine_id, endpoint=Endpoint("127.0.0.1", port), first=0)


def asked_directly(port: int, message: Message) -> Message:
    """What a kvd answers to another kvd."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(encode(message, 1))
        assert dealer.poll(int(1000 * LONG)), "no answer"
        return decode(dealer.recv())[0]


def describe(engine_id: str) -> DescribeEngine:
    return DescribeEngine(engine_id=engine_id, kvd_id="test", kvd_generation="t")


def test_eight_cards_that_nobody_can_plan_hold_up_no_honest_handshake_and_no_end() -> None:
    """Each of them is compared until it is given up, one after the other; nobody else waits for that."""
    port = free_port()
    with ExitStack() as stack:
        near, far = stack.enter_context(daemons(2))
        near.kill()
        near.environment["KVD_DRAIN_SECONDS"] = "1"
        near.start()
        stack.enter_context(attacking(demanding_engines, port, CARD_LAYERS))
        one = stack.enter_context(asker(near, layered()))
        for number in range(10):
            stack.enter_context(session(far, with_geometry(f"p{number}", layered(9 + number))))
        watch = stack.enter_context(attacked(near))
        hostile = [one.call(question(f"h{number}", port), LONG) for number in range(CARDS)]
        wait_for(lambda: near.status().counters.get("handshakes.comparisons", 0) > 0, LONG)
        before, began = given_up(near), time.monotonic()
        for number in range(10):  # each of a shape of its own, so that each has to be compared
            ready = one.call(question(f"p{number}", far.port), LONG).result(LONG)
            assert isinstance(ready, PeerReady)
        measured("ten honest handshakes beside hostile ones", time.monotonic() - began)
        meanwhile = given_up(near) - before
        verdict = watch.verdict()
        done = [future.exception() for future in hostile if future.done()]
        began = time.monotonic()
        assert near.stop(LONG) == 0
        ended = time.monotonic() - began
    assert all(getattr(error, "code", "") == "KVD-COMPARE-LIMIT" for error in done), done
    # However little of the processor there is, ten honest cards need less of it than a few hostile ones. Had an honest
    # one waited for the hostile ones, all of these would have been given up.
    assert meanwhile < CARDS // 2, (
        f"{meanwhile} hostile ones were given up while ten honest ones were compared"
    )
    measured("from SIGTERM to the end, of which 1 s to drain", ended)
    least = CPU_SECONDS * (CARDS - len(done) - 1)  # what those that were left would have taken
    assert ended < least, f"kvd ended {ended:.1f} s after SIGTERM, with {CARDS - len(done)} left to compare"
    assert_unfelled(verdict)


def given_up(kvd: Daemon) -> int:
    """The comparisons that took too long."""
    return kvd.status().counters.get("handshakes.comparisons_given_up", 0)


@pytest.fixture
def liar() -> Iterator[tuple[Daemon, Daemon, KvdSession, int]]:
    """Two kvds, a worker of ``d`` at the first, ``p`` at the second; and the port of a kvd that lies."""
    port = free_port()
    with ExitStack() as stack:
        near, far = stack.enter_context(daemons(2))
        one = stack.enter_context(asker(near, geometry()))
        stack.enter_context(session(far, worker(facts("p", cache_dtype="one"))))
        told = asked_directly(far.port, describe("p"))
        assert isinstance(told, EngineDescribed)
        stack.enter_context(attacking(lying, port, told, geometry(rank=0)))
        yield near, far, one, port


def test_untrue_cards_are_refused_and_an_honest_engine_is_not_refused_for_them(
    liar: tuple[Daemon, Daemon, KvdSession, int],
) -> None:
    near, far, one, port = liar
    for lie, told in {
        "another engine": r"asked for engine 'another engine', got the card of 'p'",
        "another generation": r"generation '0123456789abcdef' by its card and '[0-9a-f]{16}' by its workers",
        "a rank twice": r"worker tp0 twice among 2",
        "a rank missing": r"2 workers by its facts and 1 by its card",
        "a rank outside": r"worker tp3, and tp 1",
        "a worker of another": r"one of 'p'",
    }.items():
        error = one.call(question(lie, port), LONG).exception(LONG)
        assert getattr(error, "code", "") == "KVD-PEER-CARD", (lie, error)
        with pytest.raises(AssertionError, match=told):
            raise AssertionError(str(error))
    assert not [row for row in near.engines().values() if not row.local]
    # It says that its shape is that of `p`, which it is not; what becomes of it must not become of `p`.
    one.call(question("x", port), LONG).exception(LONG)
    ready = one.call(question("p", far.port), LONG).result(LONG)
    assert isinstance(ready, PeerReady)
    assert near.status().counters["handshakes.comparisons"] == 2


def test_a_card_larger_than_a_message_is_told_in_parts_or_refused_with_both_sizes() -> None:
    engine = facts("p", tp=64)
    with daemons(1) as (near,), ExitStack() as stack:
        (far,) = stack.enter_context(daemons(1))
        far.kill()
        far.environment["KVD_PEER_MAX_MESSAGE_BYTES"] = "16384"
        far.start()
        for rank in range(64):
            stack.enter_context(session(far, worker(engine, rank)))
        one = stack.enter_context(asker(near, geometry()))
        # A kvd of before asks for it in one message.
        refused = asked_directly(far.port, describe("p"))
        assert getattr(refused, "code", "") == "KVD-TOO-LARGE"
        assert "at most 16384" in getattr(refused, "message", "")
        first = one.call(question("p", far.port), LONG).result(LONG)
        assert isinstance(first, PeerReady)
        assert first.part is not None
        assert (first.part.next, first.part.total, first.peer.workers) == (64, 64, ())
        assert near.status().counters["handshakes.flights"] == 1
        # A worker of before is told the whole.
        whole = one.call(msgspec.structs.replace(question("p", far.port), first=None), LONG).result(LONG)
        assert isinstance(whole, PeerReady)
        assert len(whole.peer.workers) == 64
        assert whole.peer.workers[63].geometry == geometry(63)
        (link,) = near.status().peers
        assert link.state == "up"


def test_engines_whose_scheduler_is_there_are_told_to_workers_in_the_form_that_they_know() -> None:
    told: dict[str, list[PeerReady]] = {"whole": [], "parts": []}

    def pushed(form: str, message: Message) -> None:
        if isinstance(message, PeerReady):
            told[form].append(message)

    engine = facts("d", tp=2)
    with daemons(1) as (kvd,), ExitStack() as stack:
        stack.enter_context(session(kvd, worker(engine, 0), lambda m: pushed("whole", m)))
        knows = msgspec.structs.replace(worker(engine, 1), parts=True)
        stack.enter_context(session(kvd, knows, lambda m: pushed("parts", m)))
        stack.enter_context(session(kvd, scheduler(engine)))
        stack.enter_context(session(kvd, worker(facts("p"))))
        stack.enter_context(session(kvd, scheduler(facts("p"))))
        deadline = time.monotonic() + LONG
        while not (told["whole"] and told["parts"]) and time.monotonic() < deadline:
            time.sleep(0.01)
        (whole,), (part,) = told["whole"], told["parts"]
        assert (len(whole.peer.workers), whole.part) == (1, None)
        assert part.part is not None
        assert (len(part.peer.workers), part.part.total) == (0, 1)


def test_a_link_that_was_sent_too_large_a_card_serves_again() -> None:
    port = free_port()
    with daemons(1) as (near,), ExitStack() as stack:
        stack.enter_context(attacking(too_large_at_first, port, 17 << 20, geometry()))
        one = stack.enter_context(asker(near, geometry()))
        error = one.call(question("p", port), LONG).exception(LONG)
        assert getattr(error, "code", "") == "KVD-PEER-UNREACHABLE", error

        def again() -> PeerReady | None:
            future = one.call(question("p", port), LONG)
            if future.exception(LONG) is not None:
                time.sleep(0.1)  # until the link is there again; nothing announces it
                return None
            ready = future.result()
            assert isinstance(ready, PeerReady)
            return ready

        assert wait_for(again, LONG).peer.engine.engine_id == "p"
