"""What others have kvd remember for them: it is limited by the bytes that it takes, and not by numbers alone.

A text of 500 letters and one wide character has 504 bytes on the wire and 2,000 in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import zmq

from kvd.wire.frame import Message, decode, encode
from kvd.wire.handshake import Ping
from kvd.wire.identity import Endpoint, LeaseKey
from kvd.wire.limits import LONGEST_INCARNATION
from kvd.wire.order import PlannedMiss, ReportForced
from kvd.wire.query import GetStatus, KvdStatus
from kvd.wire.registration import OpenLease, OpenReader, Registered, RegisterWorker, Unregister
from kvd.wire.reply import Ok, Refused
from tests.support.attacked import assert_unfelled, attack, attacked
from tests.support.daemons import daemons, facts, scheduler, wait_for, worker
from tests.support.orders import order

WIDE = "\U0001f600"
AT_A_TIME = 32


def spoken(dealer: zmq.Socket[bytes], message: Message, of: int) -> Message:
    """The answer to a message."""
    dealer.send(encode(message, of))
    while True:
        answer, to = decode(dealer.recv())
        if to == of:
            return answer


def all_spoken(dealer: zmq.Socket[bytes], messages: Iterable[Message], first: int) -> Iterator[Message]:
    """The answers to messages, in their order. The next ones are sent before: it is not the way that takes time."""
    waiting: deque[int] = deque()
    told: dict[int, Message] = {}

    def next_answer() -> Message:
        of = waiting.popleft()
        while of not in told:
            answer, to = decode(dealer.recv())
            told[to] = answer
        return told.pop(of)

    for number, message in enumerate(messages, first):
        dealer.send(encode(message, number))
        waiting.append(number)
        if len(waiting) > AT_A_TIME:
            yield next_answer()
    while waiting:
        yield next_answer()


def give_large_orders(directory: Path) -> None:
    """As many orders as are kept, each about as many requests as are kept, with the longest ids."""
    requests = tuple(
        PlannedMiss(
            request_id=f"{number:05}{'r' * 500}{WIDE}", prefiller=f"{'p' * 500}{WIDE}", loading=False, tokens=1,
            keeps=0, recomputes=1,
        )
        for number in range(2048)
    )  # fmt: skip
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, 20_000
        dealer.connect(f"ipc://{directory}/kvd.sock")
        card = scheduler(facts("e"))
        assert isinstance(spoken(dealer, card, 1), Registered)
        for number in range(64):
            given = order("e", f"o{number}", card.incarnation)
            given = msgspec.structs.replace(
                given, plan=msgspec.structs.replace(given.plan, requests=requests)
            )
            assert spoken(dealer, ReportForced(order=given), 2 + number) == Ok()


def test_large_orders_are_remembered_by_their_bytes() -> None:
    """64 orders of one user: kvd had 593 MiB."""
    with daemons() as (kvd,):
        with attacked(kvd) as watch:
            assert attack(give_large_orders, kvd.directory, seconds=60.0)
        assert_unfelled(watch.verdict(), ping_seconds=0.1)


def register_wide_facts(directory: Path) -> None:
    """Schedulers whose facts have nearly the bytes that a registration may have, until no more are taken."""
    wide = {f"f{n}": "x" * 16_000 + WIDE for n in range(240)}
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, 20_000
        dealer.connect(f"ipc://{directory}/kvd.sock")
        for number in range(40):
            engine = msgspec.structs.replace(facts(f"e{number}"), facts=dict(wide))
            answer = spoken(dealer, scheduler(engine), 1 + number)
            if isinstance(answer, Refused):
                assert answer.code == "KVD-TOO-MANY"
                return


def test_facts_of_wide_characters_count_as_what_they_take() -> None:
    """What counted as the 128 MiB of cards that one user may have: kvd had 569 MiB."""
    with daemons() as (kvd,):
        with attacked(kvd) as watch:
            assert attack(register_wide_facts, kvd.directory, seconds=60.0)
            wait_for(lambda: kvd.status().counters.get("refused.KVD-TOO-MANY", 0) > 0)
        assert_unfelled(watch.verdict(), ping_seconds=0.1)


def ping_of_much(port: int) -> None:
    """Another kvd that says on each of its connections that it uses a thousand engines, which are not there."""
    using = tuple((f"{n:04}{'e' * 480}{WIDE}", f"{'g' * 480}{WIDE}") for n in range(1024))
    frame = encode(Ping(kvd_id="x", kvd_generation="y", using=using), 1)
    with zmq.Context() as context:
        for _ in range(100):
            with context.socket(zmq.DEALER) as dealer:
                dealer.linger, dealer.rcvtimeo = 0, 20_000
                dealer.connect(f"tcp://127.0.0.1:{port}")
                dealer.send(frame)
                dealer.recv()


def test_what_a_peer_says_that_it_uses_is_remembered_where_it_is_here() -> None:
    """A hundred connections, each for half a minute: kvd had 459 MiB."""
    with daemons() as (kvd,):
        with attacked(kvd) as watch:
            assert attack(ping_of_much, kvd.port, seconds=60.0)
        assert_unfelled(watch.verdict(), ping_seconds=0.1)


def register_wide_names(directory: Path) -> None:
    """Workers and schedulers all of whose names are as long and as wide as they may be, which end and come anew."""
    text = "n" * 500 + WIDE
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, 20_000
        dealer.connect(f"ipc://{directory}/kvd.sock")

        def register(number: int) -> RegisterWorker:
            engine = msgspec.structs.replace(facts(f"{number}{text}"), model="m" * 16_000 + WIDE)
            made = worker(engine, incarnation=f"{number:064}{WIDE}"[-LONGEST_INCARNATION:])
            card = msgspec.structs.replace(made.card, host=text, backend=text)
            return msgspec.structs.replace(made, card=card)

        for first in range(1, 9001, 1500):
            names = []
            for number, answer in enumerate(
                all_spoken(dealer, map(register, range(first, first + 1500)), first), first
            ):
                if isinstance(answer, Refused):
                    assert answer.code == "KVD-TOO-MANY", answer
                else:
                    names.append(f"{number:064}{WIDE}"[-LONGEST_INCARNATION:])
            ended = all_spoken(dealer, (Unregister(incarnation=name) for name in names), 10_000 + first)
            assert list(ended) == [Ok()] * len(names)


def test_names_of_wide_characters_count_as_what_they_take_also_of_who_is_gone() -> None:
    """Who was gone kept the name of its model: kvd had 366 MiB."""
    with daemons() as (kvd,):
        with attacked(kvd) as watch:
            assert attack(register_wide_names, kvd.directory, seconds=90.0)
        assert_unfelled(watch.verdict(), ping_seconds=0.1)


def register_workers_with_wide_names(directory: Path) -> None:
    """As many workers of one engine as there may be, whose hosts, backends and incarnations are wide."""
    text = "n" * 500 + WIDE
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, 20_000
        dealer.connect(f"ipc://{directory}/kvd.sock")

        def register(number: int) -> RegisterWorker:
            engine = facts(f"{number}{text}")
            made = worker(engine, incarnation=f"{number:064}{WIDE}"[-LONGEST_INCARNATION:])
            card = msgspec.structs.replace(made.card, host=f"{number}{text}", backend=f"{number}{text}")
            return msgspec.structs.replace(made, card=card)

        for answer in all_spoken(dealer, map(register, range(16_384)), 1):
            if isinstance(answer, Refused):
                assert answer.code == "KVD-TOO-MANY", answer
                return


def test_as_many_workers_with_wide_names_as_are_taken() -> None:
    with daemons() as (kvd,):
        with attacked(kvd) as watch:
            assert attack(register_workers_with_wide_names, kvd.directory, seconds=90.0)
        assert_unfelled(watch.verdict(), ping_seconds=0.1)


def present_wide_names(directory: Path) -> None:
    """Two engines present as many leases and claims as one user may have, each text as long as it may be."""
    wide = "x" * 500 + WIDE
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, 20_000
        dealer.connect(f"ipc://{directory}/kvd.sock")
        reads, keeps = scheduler(facts("reads")), scheduler(facts("keeps"))
        for number in range(16):
            names = [f"{number:02}{n:04}" for n in range(4000)]
            where = Endpoint(f"{'h' * 250}{WIDE}", 1)
            readers = tuple(
                OpenReader(
                    LeaseKey(engine_id=wide, request_id=f"{name}{wide}", endpoint=where),
                    f"{name}{'r' * 50}{WIDE}",
                    600.0,
                )
                for name in names
            )
            leases = tuple(OpenLease(f"{name}{wide}", 600.0) for name in names)
            for card in (
                msgspec.structs.replace(reads, readers=readers),
                msgspec.structs.replace(keeps, leases=leases, complete=False),
            ):
                answer = spoken(dealer, card, 1 + number)
                assert isinstance(answer, Registered), answer

        def claims() -> float:
            status = spoken(dealer, GetStatus(), 100)
            assert isinstance(status, KvdStatus), status
            return status.gauges["readers.remembered"]

        # Here and not in the test: with the process that made them its claims are gone.
        wait_for(lambda: claims() > 0)


def test_names_of_wide_characters_count_as_what_they_take() -> None:
    """Leases and claims of one user, as many as were taken by their number alone: kvd had 602 MiB."""
    with daemons() as (kvd,):
        with attacked(kvd) as watch:
            assert attack(present_wide_names, kvd.directory, seconds=90.0)
        assert_unfelled(watch.verdict(), ping_seconds=0.1)
