"""Peers are handed to workers before a request needs them, in one flight and one message for each worker."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager

import msgspec
import pytest

from kvd.client.session import KvdSession
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import EngineFacts
from kvd.wire.registration import RegisterScheduler, RegisterWorker
from tests.support.daemons import Daemon, daemons, facts, scheduler, session, wait_for, worker


class Pushed:
    """What a client was sent unasked."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def __call__(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def generations(self) -> list[str]:
        """Of the peers that were handed over, in order."""
        return [m.peer.generation for m in self.messages if isinstance(m, PeerReady)]


@contextmanager
def engine(
    kvd: Daemon, of: EngineFacts, pushed: list[Pushed] | None = None, *, ready: bool = True
) -> Iterator[list[KvdSession]]:
    """All workers of an engine and its scheduler, registered; the scheduler last."""
    cards: list[RegisterWorker | RegisterScheduler] = [
        *(worker(of, rank) for rank in range(of.world_size)),
        scheduler(of),
    ]
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(session(kvd, card, pushed[at] if pushed else None))
            for at, card in enumerate(cards)
        ]
        if ready:
            sessions[0].wait(lambda s: bool(s.engine_generation), 10)
        yield sessions


def ask_for(kvd: Daemon, peer: str = "p") -> GetPeer:
    return GetPeer(local_engine="d", engine_id=peer, endpoint=kvd.endpoint)


def test_whoever_asks_gets_an_answer_and_nothing_on_top_and_the_others_get_it_unasked() -> None:
    pushed = [Pushed() for _ in range(5)]
    with (
        daemons(2) as (near, far),
        engine(far, facts("p", tp=4)),
        engine(near, facts("d", tp=4), pushed) as decoders,
    ):
        far.signal(signal.SIGSTOP)  # until both have asked
        futures = [decoder.call(ask_for(far), 20) for decoder in decoders[:2]]
        wait_for(lambda: near.status().counters.get("received.get_peer") == 2)
        far.signal(signal.SIGCONT)
        assert not wait(futures, 20).not_done
        for others in pushed[2:]:
            wait_for(lambda seen=others: seen.messages)  # type: ignore[misc]
        assert [len(seen.generations) for seen in pushed] == [0, 0, 1, 1, 1]
        counters = near.status().counters
        assert counters["handshakes.flights"] == 1
        assert counters["events.handshake.done"] == 1


def test_a_scheduler_is_told_of_a_peer_without_its_workers() -> None:
    pushed = [Pushed() for _ in range(3)]
    with (
        daemons(2) as (near, far),
        engine(far, facts("p", tp=2)),
        engine(near, facts("d", tp=2), pushed) as (first, _, chief),
    ):
        answer = first.call(ask_for(far), 20).result(20)
        assert isinstance(answer, PeerReady)
        assert len(answer.peer.workers) == 2
        told = wait_for(lambda: next((m for m in pushed[2].messages if isinstance(m, PeerReady)), None))
        asked = chief.call(ask_for(far), 20).result(20)
        assert isinstance(asked, PeerReady)
        for brief in (told, asked):
            assert (brief.peer.workers, brief.peer.generation) == ((), answer.peer.generation)


def test_replicas_of_an_engine_are_compared_once() -> None:
    with (
        daemons(2) as (near, far),
        engine(far, facts("p")),
        engine(far, facts("q")),
        engine(near, facts("d")) as (one, _),
    ):
        first = one.call(ask_for(far), 20).result(20)
        second = one.call(ask_for(far, "q"), 20).result(20)
        assert isinstance(first, PeerReady)
        assert isinstance(second, PeerReady)
        assert near.status().counters["handshakes.comparisons"] == 1


def test_a_replica_with_another_model_is_not_taken_for_the_same() -> None:
    with (
        daemons(2) as (near, far),
        engine(far, facts("p")),
        engine(far, facts("q", model="another")),
        engine(near, facts("d")) as (one, _),
    ):
        assert isinstance(one.call(ask_for(far), 20).result(20), PeerReady)
        assert "model" in str(one.call(ask_for(far, "q"), 20).exception(20))


def test_a_peer_that_restarted_is_handed_over_before_it_is_asked_for() -> None:
    pushed = [Pushed() for _ in range(2)]
    with daemons(2) as (near, far), engine(near, facts("d"), pushed) as (one, _):
        with engine(far, facts("p")):
            old = one.call(ask_for(far), 20).result(20)
            assert isinstance(old, PeerReady)
        with engine(far, facts("p")):
            new = wait_for(lambda: pushed[0].generations, 20)
            assert new[0] != old.peer.generation
            wait_for(lambda: pushed[1].generations[-1:] == new[:1])
            again = one.call(ask_for(far), 20).result(20)
            assert isinstance(again, PeerReady)
            assert (again.cached, again.seconds, again.peer.generation) == (True, 0.0, new[0])


def test_an_engine_that_restarts_is_handed_the_peers_that_it_knew() -> None:
    pushed = [Pushed() for _ in range(2)]
    with daemons(2) as (near, far), engine(far, facts("p")):
        with engine(near, facts("d")) as (one, _):
            known = one.call(ask_for(far), 20).result(20)
            assert isinstance(known, PeerReady)
        with engine(near, facts("d"), pushed):
            assert wait_for(lambda: pushed[0].generations, 20) == [known.peer.generation]


def test_engines_of_one_kvd_are_handed_each_other_ahead() -> None:
    pushed = [[Pushed() for _ in range(2)] for _ in range(3)]
    here = {
        "p": msgspec.structs.replace(facts("p"), role="prefill"),
        "d": msgspec.structs.replace(facts("d"), role="decode"),
        "e": msgspec.structs.replace(facts("e"), role="decode"),
    }
    with (
        daemons(1) as (kvd,),
        engine(kvd, here["p"], pushed[0]) as (p, _),
        engine(kvd, here["d"], pushed[1]) as (d, _),
        engine(kvd, here["e"], pushed[2]),
    ):
        for seen in pushed[1:]:
            for client in seen:
                assert wait_for(lambda client=client: client.generations) == [p.state.engine_generation]  # type: ignore[misc]
        for client in pushed[0]:
            wait_for(lambda client=client: len(client.generations) == 2)  # type: ignore[misc]
        ask = GetPeer(local_engine="d", engine_id="p", endpoint=kvd.endpoint)
        answer = d.call(ask, 20).result(20)
        assert isinstance(answer, PeerReady)
        assert (answer.cached, answer.seconds) == (True, 0.0)
        assert len(pushed[1][0].generations) == 1  # and decoders have nothing to do with each other


@pytest.mark.parametrize("missing", ["ours", "theirs"])
def test_no_engine_is_handed_over_while_one_of_the_two_still_warms_up(missing: str) -> None:
    """vLLM makes the scheduler when the workers have warmed up."""
    pushed = Pushed()
    ours, theirs = facts("d"), facts("p")
    with (
        daemons(1) as (kvd,),
        session(kvd, worker(ours), pushed) as one,
        session(kvd, worker(theirs)) as other,
        session(kvd, scheduler(theirs if missing == "ours" else ours)) as chief,
    ):
        for client in (one, other):
            client.wait(lambda s: bool(s.engine_generation), 10)
        chief.wait(lambda s: s.connected, 10)
        kvd.status()
        assert not pushed.generations
        with session(kvd, scheduler(ours if missing == "ours" else theirs)):
            assert wait_for(lambda: pushed.generations) == [other.state.engine_generation]


def test_sixty_four_workers_register_at_once_and_the_loop_stays_free() -> None:
    with (
        daemons(2) as (near, far),
        engine(far, facts("p", tp=64), ready=False) as prefillers,
        ExitStack() as stack,
    ):
        of = facts("d", tp=64)
        together = threading.Barrier(64)
        made: list[KvdSession] = []

        def register(rank: int) -> None:
            together.wait(30)
            card = worker(of, rank)
            made.append(KvdSession(lambda: card, directory=near.directory))

        threads = [threading.Thread(target=register, args=(rank,)) for rank in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for one in made:
            stack.callback(one.close)
        for one in (*made, prefillers[0]):
            one.wait(lambda s: bool(s.engine_generation), 60)
        futures = [one.call(ask_for(far), 60) for one in made]
        assert all(isinstance(future.result(60), PeerReady) for future in futures)
        status = near.status()
        assert status.counters["handshakes.flights"] == 1
        assert status.counters["handshakes.comparisons"] == 1
        assert status.gauges["loop.longest_turn_seconds"] >= status.gauges["loop.busiest_turn_seconds"]
        assert 0 < status.gauges["loop.busiest_turn_seconds"] < 0.5  # processor time: 4 to 8 ms as a rule
