"""Nobody on a host speaks for somebody else: real users, each a process of its own, at one kvd that all may use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from uuid import uuid4

import msgspec
import pytest
import zmq

from kvd.geometry.rank import Rank
from kvd.wire.frame import encode
from kvd.wire.handshake import GetPeer
from kvd.wire.identity import Endpoint
from kvd.wire.lease import LeaseClosed, LeaseOpened
from kvd.wire.order import (
    ForcedMisses,
    GetForced,
    Miss,
    ReportForced,
)
from kvd.wire.outcomes import OutcomeCount, ReportOutcomes
from kvd.wire.push import BlockRun, PushAnnounce, PushKey, PushWithdraw
from kvd.wire.query import EngineList, ListEngines
from kvd.wire.registration import Heartbeat, NotRegistered, OpenLease, Registered, Unregister
from kvd.wire.reply import Ok, Refused
from kvd.wire.transfer import (
    SCHEDULER_RANK,
    ListTransfers,
    ReportTransfers,
    TransferList,
    TransferRecord,
)
from tests.support.daemons import Daemon, facts, scheduler, wait_for, worker
from tests.support.ledgers import record
from tests.support.orders import order
from tests.support.other_user import ATTACKER, VICTIM, OtherUser, needs_root, other_user

pytestmark = needs_root


@dataclass
class Two:
    """A user with an engine of two workers and a scheduler, and another user who is in the same group."""

    kvd: Daemon
    victim: OtherUser
    head: OtherUser
    attacker: OtherUser
    engine: str
    incarnations: tuple[str, str, str]

    def states(self) -> dict[str, str]:
        """The clients of the victim's engine."""
        return {row.incarnation: row.state for row in self.kvd.workers() if row.engine_id == self.engine}


@pytest.fixture
def two(host: Daemon) -> Iterator[Two]:
    with (
        other_user(host, VICTIM) as victim,
        other_user(host, VICTIM) as head,
        other_user(host, ATTACKER) as b,
    ):
        engine = f"d-{uuid4().hex[:6]}"
        incarnations = (uuid4().hex, uuid4().hex, uuid4().hex)
        known = facts(engine, tp=2)
        for rank in (0, 1):
            assert isinstance(victim.ask(worker(known, rank, incarnations[rank])), Registered)
        assert isinstance(head.ask(scheduler(known, incarnation=incarnations[2])), Registered)
        yield Two(host, victim, head, b, engine, incarnations)


def test_nobody_unregisters_anothers_worker(two: Two) -> None:
    for incarnation in two.incarnations:
        refused = two.attacker.refused(Unregister(incarnation=incarnation))
        assert refused.code == "KVD-NOT-OWNER"
        assert refused.final
        assert f"process {two.attacker.pid} of uid {ATTACKER}" in refused.message
        assert f"of uid {VICTIM}" in refused.message
    assert two.kvd.engines()[two.engine].state == "ready"
    assert two.victim.ask(Unregister(incarnation=two.incarnations[0])) == Ok(), "its own it may"
    assert two.states()[two.incarnations[0]] == "gone"


def test_nor_does_another_process_of_the_same_user(two: Two) -> None:
    assert two.head.refused(Unregister(incarnation=two.incarnations[0])).code == "KVD-NOT-OWNER"
    assert two.head.refused(Heartbeat(incarnation=two.incarnations[0])).code == "KVD-NOT-OWNER"


def test_nobody_takes_anothers_incarnation_or_place(two: Two) -> None:
    attempts = {
        "its card": worker(facts(two.engine, tp=2), 0, two.incarnations[0]),
        "its incarnation, for an engine of his own": worker(facts("own"), 0, two.incarnations[0]),
        "its scheduler's": scheduler(facts(two.engine, tp=2), incarnation=two.incarnations[2]),
        "a place in its engine": worker(facts(two.engine, tp=2), 1),
        "its scheduler's place": scheduler(facts(two.engine, tp=2)),
    }
    for what, card in attempts.items():
        refused = two.attacker.refused(card)
        assert refused.code == "KVD-NOT-OWNER", what
        assert f"uid {ATTACKER}" in refused.message, what
        assert f"uid {VICTIM}" in refused.message, what
    assert set(two.states().values()) == {"alive"}
    two.victim.end()
    wait_for(lambda: list(two.states().values()).count("gone") == 2)
    assert two.attacker.refused(attempts["a place in its engine"]).code == "KVD-NOT-OWNER", (
        "while its scheduler lives"
    )


def test_root_is_no_exception(two: Two) -> None:
    with other_user(two.kvd, 0) as root:
        assert root.refused(worker(facts(two.engine, tp=2), 1)).code == "KVD-NOT-OWNER"
        assert root.refused(Unregister(incarnation=two.incarnations[0])).code == "KVD-NOT-OWNER"


def test_a_name_may_be_used_again_once_its_engine_has_ended_and_its_incarnations_never(two: Two) -> None:
    counted = (OutcomeCount("loaded", "", 3, 30),)
    assert two.head.ask(ReportOutcomes(engine_id=two.engine, totals=counted)) == Ok()
    two.victim.end()
    two.head.end()
    wait_for(lambda: two.kvd.engines()[two.engine].state == "gone")
    dead = two.attacker.refused(worker(facts(two.engine), 0, two.incarnations[0]))
    assert dead.code == "KVD-NOT-OWNER"
    assert " was that of " in dead.message
    assert isinstance(two.attacker.ask(worker(facts(two.engine))), Registered)
    assert two.kvd.engines()[two.engine].state == "ready"


def done(two: Two, number: int, rank: str = "tp0") -> TransferRecord:
    return msgspec.structs.replace(
        record(number, engine=two.engine), local_rank=rank, transfer_id=f"{two.engine}-{number}"
    )


def stored(two: Two) -> list[TransferRecord]:
    answer = two.kvd.ask(ListTransfers(engine_id=two.engine))
    assert isinstance(answer, TransferList)
    return [row.record for row in answer.rows]


def test_nobody_forges_or_preempts_anothers_records(two: Two) -> None:
    """A record that comes first is the one that is kept: a forged one would keep out the true one."""
    mine = uuid4().hex
    assert isinstance(two.attacker.ask(worker(facts(f"own-{two.engine}"), 0, mine)), Registered)
    forged = msgspec.structs.replace(done(two, 1), bytes=666)
    for incarnation in (mine, two.incarnations[0]):
        refused = two.attacker.refused(ReportTransfers(incarnation=incarnation, records=(forged,)))
        assert (refused.code, refused.final) == ("KVD-NOT-OWNER", True)
    assert (
        two.attacker.refused(ReportTransfers(incarnation="i", records=(forged,))).code == "KVD-NOT-REGISTERED"
    )
    assert stored(two) == []
    true = ReportTransfers(incarnation=two.incarnations[0], records=(done(two, 1),))
    assert two.victim.ask(true) == Ok()
    assert [r.bytes for r in stored(two)] == [10]


@pytest.mark.parametrize(("reporter", "rank"), [(0, "tp1"), (0, SCHEDULER_RANK), (0, "tp2"), (2, "tp0")])
def test_nobody_reports_for_another_place_of_its_own_engine(two: Two, reporter: int, rank: str) -> None:
    who = two.head if reporter == 2 else two.victim
    message = ReportTransfers(incarnation=two.incarnations[reporter], records=(done(two, 2, rank),))
    assert who.refused(message).code == "KVD-NOT-OWNER"
    assert stored(two) == []


def test_nobody_speaks_for_anothers_scheduler(two: Two) -> None:
    lease = OpenLease("r", 60.0)
    assert two.head.ask(LeaseOpened(engine_id=two.engine, leases=(lease,))) == Ok()
    mine = f"own-{two.engine}"
    assert isinstance(two.attacker.ask(scheduler(facts(mine))), Registered)
    for message in (
        LeaseOpened(engine_id=two.engine, leases=(OpenLease("forged", 60.0),)),
        LeaseClosed(engine_id=two.engine, request_id="r", end="released"),
        ReportOutcomes(engine_id=two.engine, totals=(OutcomeCount("missed", "", 9, 9),)),
        ReportForced(order=order(two.engine, "o1", two.incarnations[2])),
    ):
        assert two.attacker.refused(message).code == "KVD-NOT-OWNER"
    assert two.kvd.engines()[two.engine].leases == 1
    assert two.attacker.refused(Heartbeat(incarnation=two.incarnations[2])).code == "KVD-NOT-OWNER"
    assert isinstance(two.attacker.ask(Heartbeat(incarnation="nobody's")), NotRegistered)


def test_nobody_changes_or_pushes_out_what_is_known_of_orders_to_anothers_engine(two: Two) -> None:
    mine, own = uuid4().hex, f"own-{two.engine}"
    assert isinstance(two.attacker.ask(scheduler(facts(own), incarnation=mine)), Registered)
    name = uuid4().hex[:12]
    assert two.head.ask(ReportForced(order=order(two.engine, name, two.incarnations[2]))) == Ok()
    miss = Miss(request_id="forged", prefiller="p", state="over", tokens=1)
    assert two.attacker.refused(ReportForced(order=order(own, name, mine), miss=miss)).code == "KVD-NOT-OWNER"
    for number in range(200):
        assert two.attacker.ask(ReportForced(order=order(own, f"{own[-6:]}{number}", mine))) == Ok()
    known = two.kvd.ask(GetForced(order_id=name))
    assert isinstance(known, ForcedMisses)
    assert known.order.engine_id == two.engine
    assert known.misses == ()
    long = two.attacker.refused(ReportForced(order=order(own, "o" * 100, mine)))
    assert long.code == "KVD-BAD-ORDER"


def test_keys_for_digests_are_shown_to_nobody(two: Two) -> None:
    key = b"k" * 32
    head = uuid4().hex
    engine = f"keyed-{two.engine}"
    assert isinstance(two.victim.ask(worker(facts(engine))), Registered)
    assert isinstance(two.head.ask(scheduler(facts(engine), incarnation=head, digest_key=key)), Registered)
    for who in (two.attacker, two.victim, two.head):
        listed = who.ask(ListEngines(cards=True))
        assert isinstance(listed, EngineList)
        (row,) = (row for row in listed.rows if row.engine.engine_id == engine)
        assert row.card is not None
        assert row.card.digest_key == b""


def test_nobody_asks_for_peers_in_the_name_of_anothers_engine(two: Two) -> None:
    """The answer has where a peer's memory is, and for a scheduler the key under which it makes digests of prompts."""
    peer = f"p-{two.engine}"
    assert isinstance(two.victim.ask(worker(facts(peer), 0)), Registered)
    assert isinstance(two.attacker.ask(scheduler(facts(f"own-{two.engine}"))), Registered)
    ask = GetPeer(local_engine=two.engine, engine_id=peer, keyed=True)
    assert two.attacker.refused(ask).code == "KVD-NOT-OWNER"
    told = two.victim.ask(GetPeer(local_engine=two.engine, engine_id=peer))
    assert not (isinstance(told, Refused) and told.code == "KVD-NOT-OWNER")


def test_nobody_has_anothers_prefiller_write_without_its_card(two: Two) -> None:
    stranger = f"x-{uuid4().hex[:6]}"
    own = worker(facts(stranger))
    assert isinstance(two.attacker.ask(own), Registered)
    generation = two.kvd.engines()[two.engine].generation
    announce = PushAnnounce(
        key=PushKey(
            transfer_id="t", prefiller=two.engine, prefiller_endpoint=Endpoint(), decoder=stranger, rank=Rank(0)
        ),
        generations=(generation, two.kvd.engines()[stranger].generation),
        tokens=16, computed=0, blocks=(BlockRun(0, 0, (1,)),), window=b"", seconds=60.0,
    )  # fmt: skip
    refused = two.attacker.refused(announce)
    assert refused.code == "KVD-NOT-DESCRIBED"
    assert stranger in refused.message


def test_nobody_takes_all_places_of_pushes(two: Two) -> None:
    """Messages for workers that do not answer wait for two seconds each."""

    def withdraw(transfer: str, prefiller: str, decoder: str, rank: int = 0) -> PushWithdraw:
        key = PushKey(
            transfer_id=transfer, prefiller=prefiller, prefiller_endpoint=Endpoint(), decoder=decoder, rank=Rank(rank)
        )  # fmt: skip
        return PushWithdraw(key=key)

    with zmq.Context() as context, context.socket(zmq.DEALER) as one, context.socket(zmq.DEALER) as silent:
        for dealer, engine in ((one, "root-d"), (silent, "root-p")):
            dealer.linger, dealer.sndhwm, dealer.rcvhwm, dealer.rcvtimeo = 0, 0, 0, 10_000
            dealer.connect(f"ipc://{two.kvd.directory}/kvd.sock")
            dealer.send(encode(worker(facts(engine)), 1))
            dealer.recv()
        for number in range(1100):
            one.send(encode(withdraw(f"{number}", "root-p", "root-d"), 2 + number))
        wait_for(lambda: two.kvd.status().gauges["pushes.underway"] >= 1024)
        assert two.victim.refused(withdraw("v", "nobody", two.engine, 1)).code == "KVD-ENGINE-UNKNOWN"
        assert two.kvd.status().gauges["pushes.underway"] == 1024
        while b"KVD-BUSY" not in (answer := one.recv()):
            pass
        assert b"at most 1024 and 2097152 block ids may" in answer
