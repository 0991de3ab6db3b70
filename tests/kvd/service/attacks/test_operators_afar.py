"""What operators on another host may ask: nothing unless their host is named, and never more than questions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.client.errors import RefusedByDaemon
from kvd.client.remote import RemoteKvd, RemoteOperator
from kvd.keys import TrustedKey, write_trusted
from kvd.wire.agent import AgentList, EvictPeer, ListAgents
from kvd.wire.frame import Message, encode
from kvd.wire.order import ForceMiss, OneRequest
from kvd.wire.outcomes import GetOutcomes, Outcomes
from kvd.wire.query import (
    EngineList,
    GetStatus,
    KvdStatus,
    LeaseList,
    ListEngines,
    ListLeases,
    ListWorkers,
    WorkerList,
)
from kvd.wire.registration import Heartbeat, Unregister
from kvd.wire.transfer import GetKeptEngine, ListTransfers, TransferList
from tests.support.daemons import daemons, facts, session, worker
from tests.support.hosts import Host, hosts, speaking

Fleet = dict[str, Host]
QUESTIONS: tuple[Message, ...] = (
    GetStatus(),
    ListWorkers(),
    ListTransfers(limit=1),
    ListLeases(),
    ListAgents(),
    GetKeptEngine(engine_id="p", generation="g"),
)
"""What an operator asks and other hosts may not."""
ANSWERS = (KvdStatus, WorkerList, TransferList, LeaseList, AgentList)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Host ``asked`` is asked by hosts that it all trusts; it has an engine."""
    with hosts("asked", "desk", "other") as made, session(made["asked"].daemon, worker(facts("p"))):
        yield made


def allow(fleet: Fleet, *words: str) -> None:
    """Start the asked kvd with this setting."""
    asked = fleet["asked"].daemon
    asked.stop()
    asked.environment["KVD_ACCESS_HOSTS"] = ",".join(words)
    asked.start()


def word_of(host: Host, kind: str) -> str:
    return {
        "its place": f"127.0.0.1:{host.daemon.port}",
        "its key": host.pair.public.decode(),
        "its host": "127.0.0.1",
        "all": "*",
    }[kind]


def test_no_host_is_let_in_unless_it_is_named(fleet: Fleet) -> None:
    with speaking(fleet["desk"].pair, fleet["asked"]) as desk:
        for question in QUESTIONS:
            refused = desk.refused(question)
            assert refused.code == "KVD-NOT-PERMITTED"
            assert f"127.0.0.1:{fleet['desk'].daemon.port}" in refused.message
            assert "access.hosts" in refused.hint
        engines, outcomes = desk.ask(ListEngines()), desk.ask(GetOutcomes())
        assert isinstance(engines, EngineList)
        assert [row.engine.engine_id for row in engines.rows] == ["p"], "peers may ask that anyway"
        assert isinstance(outcomes, Outcomes)


@pytest.mark.parametrize("kind", ["its place", "its key", "its host", "all"])
def test_a_host_that_is_named_may_ask(fleet: Fleet, kind: str) -> None:
    allow(fleet, word_of(fleet["desk"], kind))
    with speaking(fleet["desk"].pair, fleet["asked"]) as desk:
        assert tuple(type(desk.ask(question)) for question in QUESTIONS[:5]) == ANSWERS
        assert desk.refused(QUESTIONS[5]).code == "KVD-NO-ENGINE"
    with speaking(fleet["other"].pair, fleet["asked"]) as other:
        if kind in ("its place", "its key"):
            assert {other.refused(question).code for question in QUESTIONS} == {"KVD-NOT-PERMITTED"}
        else:
            assert isinstance(other.ask(GetStatus()), KvdStatus)


def test_a_host_that_is_named_changes_nothing(fleet: Fleet) -> None:
    allow(fleet, "*")
    with speaking(fleet["desk"].pair, fleet["asked"]) as desk:
        for order in (
            ForceMiss(engine_id="p", target=OneRequest("r"), carry_out=True),
            EvictPeer(engine_id="q", carry_out=True),
            Heartbeat(incarnation="i"),
            Unregister(incarnation="i"),
        ):
            assert desk.refused(order).code == "KVD-NOT-HERE"


def test_a_named_host_whose_key_is_revoked_is_asked_for_its_key_first(fleet: Fleet) -> None:
    allow(fleet, "*")
    with speaking(fleet["desk"].pair, fleet["asked"]) as desk:
        assert isinstance(desk.ask(GetStatus()), KvdStatus)
        fleet["asked"].trust_and_wait(fleet["other"])
        assert not desk.answered(GetStatus(), 1.0)
    fleet["asked"].trust_and_wait(fleet["desk"], fleet["other"])


def test_without_keys_only_a_word_for_all_lets_anybody_in() -> None:
    with daemons(1) as (kvd,):
        kvd.stop()
        for words in ("127.0.0.1", "*"):
            kvd.environment["KVD_ACCESS_HOSTS"] = words
            kvd.start()
            with RemoteOperator(RemoteKvd("127.0.0.1", kvd.port), 10.0) as nobody:
                if words == "*":
                    assert isinstance(nobody.ask(GetStatus()), KvdStatus)
                else:
                    with pytest.raises(RefusedByDaemon, match=r"access\.hosts"):
                        nobody.ask(GetStatus())
            kvd.stop()


def test_long_lists_of_names_and_keys_are_looked_through_and_not_told(fleet: Fleet) -> None:
    asked, desk = fleet["asked"], fleet["desk"]
    many = [f"10.0.{n >> 8}.{n & 255}:7766" for n in range(4096)]
    allow(fleet, *many)
    strangers = [TrustedKey(desk.pair.public, place.removesuffix(":7766"), 7766) for place in many]
    write_trusted(asked.trusted, [desk.line, fleet["other"].line, *strangers])
    allow(fleet, *many[1:], "nobody")
    with speaking(desk.pair, asked) as speaker:
        assert isinstance(speaker.ask(GetStatus()), KvdStatus), "its key stands at 4,096 of those places"
    write_trusted(asked.trusted, [fleet["other"].line, TrustedKey(desk.pair.public, "x" * 2000, 1)])
    allow(fleet, *many)
    with speaking(desk.pair, asked) as speaker:
        refused = speaker.refused(GetStatus())
        assert refused.code == "KVD-NOT-PERMITTED"
        assert "names 4096 others" in refused.message
        assert len(encode(refused, 1)) < 3 << 10
    asked.trust(desk, fleet["other"])
