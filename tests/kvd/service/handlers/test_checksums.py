"""Questions for checksums: who may ask, whom they reach, and what is refused for good."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.client.errors import RefusedByDaemon
from kvd.client.session import KvdSession
from kvd.geometry.rank import Rank
from kvd.wire.checksum import GetSums, Sums, SumsOf
from kvd.wire.frame import Message
from kvd.wire.identity import Endpoint
from kvd.wire.reply import Ok, Refused
from tests.support.daemons import Daemon, daemons, facts, scheduler, session, worker

LONG = 30.0
SUMS = Sums(tokens=7, groups=(b"12345678",))


class Prefiller:
    """Two workers of one engine; rank 1 answers as a test says."""

    def __init__(self) -> None:
        self.answer: Message | None = SUMS
        self.heard: list[tuple[int, Message]] = []
        self.generation = ""

    def take(self, rank: int, message: Message) -> Message | None:
        self.heard.append((rank, message))
        return self.answer


@pytest.fixture
def kvd() -> Iterator[Daemon]:
    with daemons() as (one,):
        yield one


@pytest.fixture
def prefiller(kvd: Daemon) -> Iterator[Prefiller]:
    made, engine = Prefiller(), facts("p", tp=2)
    with (
        session(kvd, worker(engine, 0), lambda message: made.take(0, message)) as first,
        session(kvd, worker(engine, 1), lambda message: made.take(1, message)),
        session(kvd, scheduler(engine)),
    ):
        made.generation = first.wait(lambda s: bool(s.engine_generation), LONG).engine_generation
        yield made


@pytest.fixture
def decoder(kvd: Daemon) -> Iterator[KvdSession]:
    with session(kvd, worker(facts("d"))) as made:
        yield made


def question(
    prefiller: Prefiller, *, rank: int = 1, generation: str | None = None, engine: str = "p"
) -> GetSums:
    return GetSums(
        engine_id=engine, generation=prefiller.generation if generation is None else generation, endpoint=Endpoint(),
        rank=Rank(rank), request_id="r", wanted=(SumsOf(0, 0, 1),),
    )  # fmt: skip


def refusal(decoder: KvdSession, message: GetSums) -> Refused:
    error = decoder.call(message, LONG).exception(LONG)
    assert isinstance(error, RefusedByDaemon)
    return error.refusal


def test_a_question_reaches_the_worker_that_it_names(prefiller: Prefiller, decoder: KvdSession) -> None:
    asked = question(prefiller)
    assert decoder.call(asked, LONG).result(LONG) == SUMS
    assert prefiller.heard == [(1, asked)]


def test_what_the_worker_refuses_comes_back_as_it_said_it(prefiller: Prefiller, decoder: KvdSession) -> None:
    prefiller.answer = Refused(code="KVD-CONNECTOR-SUMS", message="not ready", hint="ask again")
    found = refusal(decoder, question(prefiller))
    assert (found.code, found.final, found.hint) == ("KVD-CONNECTOR-SUMS", False, "ask again")
    assert "not ready" in found.message


def test_an_answer_of_another_kind_is_not_passed_on(prefiller: Prefiller, decoder: KvdSession) -> None:
    prefiller.answer = Ok()
    assert "answered a get_sums with ok" in refusal(decoder, question(prefiller)).message


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"generation": "before"}, "KVD-PEER-GENERATION"),
        ({"generation": ""}, "KVD-PEER-GENERATION"),
        ({"rank": 2}, "KVD-RANK-UNKNOWN"),
    ],
)
def test_a_question_for_nobody_is_refused_for_good(
    prefiller: Prefiller, decoder: KvdSession, changes: dict[str, object], code: str
) -> None:
    found = refusal(decoder, question(prefiller, **changes))  # type: ignore[arg-type]
    assert (found.code, found.final) == (code, True)
    assert not prefiller.heard


def test_an_engine_that_nobody_knows_is_refused(prefiller: Prefiller, decoder: KvdSession) -> None:
    assert "'q'" in refusal(decoder, question(prefiller, engine="q")).message


def test_only_workers_may_ask(kvd: Daemon, prefiller: Prefiller) -> None:
    assert kvd.ask_refused(question(prefiller)).code == "KVD-NOT-REGISTERED"
    assert not prefiller.heard
