"""The key for digests of prompts: it reaches the schedulers of peers, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import pytest

from kvd.client.errors import ClientError
from kvd.client.session import KvdSession
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import Endpoint
from kvd.wire.query import EngineList, ListEngines
from kvd.wire.registration import RegisterScheduler
from kvd.wire.reply import Refused
from kvd.wire.transfer import GetKeptEngine, ReportTransfers
from tests.support.daemons import Daemon, daemons, facts, scheduler, session, wait_for, worker
from tests.support.ledgers import record

KEY = b"\x07the key of the prefiller, secre"
P, D = facts("p"), facts("d")


def ask(kvd: Daemon | None, *, keyed: bool = True) -> GetPeer:
    endpoint = Endpoint() if kvd is None else kvd.endpoint
    return GetPeer(local_engine="d", engine_id="p", endpoint=endpoint, keyed=keyed)


def told(client: KvdSession, message: GetPeer) -> PeerReady:
    answer = client.call(message, 20).result(20)
    assert isinstance(answer, PeerReady)
    return answer


@contextmanager
def decoder(kvd: Daemon) -> Iterator[tuple[KvdSession, KvdSession]]:
    """A decoding engine's worker and its scheduler."""
    with session(kvd, worker(D, incarnation="i")) as hand, session(kvd, scheduler(D)) as head:
        hand.wait(lambda s: bool(s.engine_generation), 10)
        yield hand, head


@pytest.mark.parametrize("count", [1, 2], ids=["one kvd", "two kvds"])
def test_a_decoders_scheduler_gets_the_key_and_its_workers_do_not(count: int) -> None:
    with daemons(count) as kvds:
        near, far = kvds[0], kvds[-1]
        where = None if count == 1 else far
        with (
            session(far, worker(P)),
            session(far, scheduler(P, digest_key=KEY)),
            decoder(near) as (hand, head),
        ):
            assert told(head, ask(where)).peer.digest_key == KEY
            assert told(hand, ask(where)).peer.digest_key == b""
            assert told(head, ask(where, keyed=False)).peer.digest_key == KEY, "it costs nothing to have it"
            stranger = near.ask(ask(where))
            assert isinstance(stranger, PeerReady)
            assert stranger.peer.digest_key == b"", "who is no scheduler has no use for it"


@pytest.mark.parametrize("count", [1, 2], ids=["one kvd", "two kvds"])
def test_a_key_that_comes_after_the_card_is_learnt_by_who_asks_for_it(count: int) -> None:
    with daemons(count) as kvds:
        near, far = kvds[0], kvds[-1]
        where = None if count == 1 else far
        with session(far, worker(P)), decoder(near) as (_, head):
            assert told(head, ask(where, keyed=False)).peer.digest_key == b""
            waiting = head.call(ask(where), 20)
            with session(far, scheduler(P, digest_key=KEY)):
                answer = waiting.result(20)
                assert isinstance(answer, PeerReady)
                assert answer.peer.digest_key == KEY, "its scheduler is waited for a moment"
                assert told(head, ask(where)).peer.digest_key == KEY
            asked = near.status().counters.get("handshakes.flights", 0)
            assert told(head, ask(where)).peer.digest_key == KEY
            assert near.status().counters.get("handshakes.flights", 0) == asked, "what is known is asked once"


def test_an_engine_without_a_scheduler_is_given_without_a_key() -> None:
    with daemons(2) as (near, far), session(far, worker(P)), decoder(near) as (_, head):
        assert told(head, ask(far)).peer.digest_key == b""


def test_the_key_of_an_engine_outlives_its_kvd() -> None:
    with daemons(2) as (near, far):
        registered = scheduler(P, digest_key=KEY)
        with session(far, worker(P)), session(far, registered), decoder(near) as (_, head):
            generation = told(head, ask(far)).peer.generation
            for kvd in (near, far):
                kvd.kill()
                kvd.start()

            def again() -> PeerReady | None:
                with suppress(ClientError):
                    return told(head, ask(far))
                return None

            found = wait_for(again, 20)
            assert (found.peer.generation, found.peer.digest_key) == (generation, KEY)


@pytest.mark.parametrize("length", [1, 16, 31, 33, 65])
def test_a_key_of_another_length_is_refused(length: int) -> None:
    """A decoder's scheduler could make no digests with it."""
    with daemons() as (kvd,):
        refused = kvd.ask_refused(scheduler(P, digest_key=bytes(length)))
        assert isinstance(refused, Refused)
        assert (refused.code, refused.message) == (
            "KVD-BAD-CARD",
            f"digest_key has {length} bytes, wanted are 32 or none",
        )


def test_operators_logs_and_ledgers_never_see_it() -> None:
    with (
        daemons(2) as (near, far),
        session(far, worker(P)),
        session(far, scheduler(P, digest_key=KEY)),
        decoder(near) as (hand, head),
    ):
        generation = told(head, ask(far)).peer.generation
        made = msgspec.structs.replace(record(1), remote_engine="p", remote_generation=generation)
        hand.call(ReportTransfers(incarnation="i", records=(made,)), 20).result(20)
        for kvd in (near, far):
            listed = kvd.ask(ListEngines(cards=True))
            assert isinstance(listed, EngineList)
            cards = [row.card for row in listed.rows if row.card is not None]
            assert any(card.engine.engine_id == "p" for card in cards)
            assert all(card.digest_key == b"" for card in cards)
        near.ask(GetKeptEngine(engine_id="p", generation=generation))
        for kvd in (near, far):
            for path in kvd.directory.parent.rglob("*"):
                if path.is_file() and not path.is_socket():
                    assert KEY not in path.read_bytes(), path
            assert KEY[1:].decode() not in kvd.log
            assert KEY.hex() not in kvd.log


def test_the_key_is_in_no_text_that_is_made_of_a_message() -> None:
    message = scheduler(P, digest_key=KEY)
    assert isinstance(message, RegisterScheduler)
    assert "the key of" not in repr(message)
    assert "incarnation" in repr(message)
