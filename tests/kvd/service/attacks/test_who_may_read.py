"""What each user of a host may read of another's engines: real users, each a process of its own."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from uuid import uuid4

import msgspec
import pytest

from kvd.wire.agent import AgentList, EvictPeer, ListAgents
from kvd.wire.locality import Locality
from kvd.wire.order import (
    ForcedMisses,
    GetForced,
    ReportForced,
)
from kvd.wire.outcomes import GetOutcomes, OutcomeCount, Outcomes, ReportOutcomes
from kvd.wire.query import EngineList, ListEngines, ListWorkers, WorkerList
from kvd.wire.registration import Registered
from kvd.wire.reply import Ok
from kvd.wire.transfer import (
    GetKeptEngine,
    KeptEngine,
    ListTransfers,
    ReportTransfers,
    TransferList,
)
from tests.support.daemons import Daemon, facts, scheduler, wait_for, worker
from tests.support.ledgers import record
from tests.support.orders import order
from tests.support.other_user import ATTACKER, VICTIM, OtherUser, needs_root, other_user, shared_kvd

pytestmark = needs_root


@pytest.fixture(scope="module")
def private() -> Iterator[Daemon]:
    """A kvd whose users see what is of their own engines alone."""
    with shared_kvd(KVD_ACCESS_READ="own") as kvd:
        yield kvd


@contextmanager
def readers(kvd: Daemon) -> Iterator[tuple[OtherUser, OtherUser, str]]:
    """A user with an engine that has a record, an outcome, a lease and an order; another user with one; their ids."""
    with other_user(kvd, VICTIM) as a, other_user(kvd, VICTIM) as head, other_user(kvd, ATTACKER) as b:
        name, one, two = uuid4().hex[:6], uuid4().hex, uuid4().hex
        for who, engine, incarnation in ((a, f"a-{name}", one), (b, f"b-{name}", two)):
            known = facts(engine, model="private", role="prefill")
            presented = msgspec.structs.replace(
                worker(known, 0, incarnation), locality=Locality(cpus="0-3", numa=(0,))
            )
            assert isinstance(who.ask(presented), Registered)
            made = record(1, "miss", engine)
            assert who.ask(ReportTransfers(incarnation=incarnation, records=(made,))) == Ok()
        owner = uuid4().hex
        card = scheduler(facts(f"a-{name}", model="private", role="prefill"), incarnation=owner)
        assert isinstance(head.ask(card), Registered)
        assert head.ask(ReportForced(order=order(f"a-{name}", f"o-{name}", owner))) == Ok()
        assert (
            head.ask(ReportOutcomes(engine_id=f"a-{name}", totals=(OutcomeCount("loaded", "", 1, 1),)))
            == Ok()
        )
        yield a, b, name


def test_each_user_sees_its_own_where_that_is_set(private: Daemon) -> None:
    with readers(private) as (a, b, name):
        listed = b.ask(ListTransfers(limit=10))
        assert isinstance(listed, TransferList)
        assert {row.record.local_engine for row in listed.rows} == {f"b-{name}"}
        assert listed.hidden == 1
        engines = b.ask(ListEngines(cards=True))
        assert isinstance(engines, EngineList)
        rows = {row.engine.engine_id: row for row in engines.rows if name in row.engine.engine_id}
        mine, other = rows[f"b-{name}"], rows[f"a-{name}"]
        assert (mine.hidden, mine.engine.model, mine.card is not None) == (False, "private", True)
        assert (other.hidden, other.engine.model, other.card, other.generation) == (True, "", None, "")
        assert other.state == "ready", "names and states are for all"
        workers = b.ask(ListWorkers())
        assert isinstance(workers, WorkerList)
        seen = {row.engine_id: row for row in workers.rows if row.kind == "worker"}
        assert (seen[f"a-{name}"].incarnation, seen[f"a-{name}"].pid) == ("", 0)
        assert seen[f"b-{name}"].pid == b.pid
        assert seen[f"a-{name}"].locality is None
        assert seen[f"b-{name}"].locality == Locality(cpus="0-3", numa=(0,))
        agents = b.ask(ListAgents())
        assert isinstance(agents, AgentList)
        held = {row.engine_id: row for row in agents.rows if name in row.engine_id}
        assert (held[f"a-{name}"].hidden, held[f"a-{name}"].pid) == (True, 0)
        assert (held[f"b-{name}"].hidden, held[f"b-{name}"].pid) == (False, b.pid)
        assert b.refused(EvictPeer(engine_id=f"a-{name}")).code == "KVD-NOT-PERMITTED"
        served = b.ask(GetOutcomes(peers=True))
        assert isinstance(served, Outcomes)
        assert [row.engine_id for row in served.rows if name in row.engine_id] == [f"b-{name}"]
        assert served.hidden
        assert b.refused(GetForced(order_id=f"o-{name}")).code == "KVD-ORDER-UNKNOWN"
        assert isinstance(a.ask(GetForced(order_id=f"o-{name}")), ForcedMisses)
        generation = private.engines()[f"a-{name}"].generation
        assert b.refused(GetKeptEngine(engine_id=f"a-{name}", generation=generation)).code == "KVD-NO-ENGINE"
        assert isinstance(a.ask(GetKeptEngine(engine_id=f"a-{name}", generation=generation)), KeptEngine)


def test_a_filter_tells_nothing_of_what_is_not_shown(private: Daemon) -> None:
    with readers(private) as (a, b, name):
        filters: list[dict[str, Any]] = [
            {"any_id": "r-1"},
            {"request_id": "no such request"},
            {"state": "miss"},
        ]
        filters += [{"state": "done"}, {"engine_id": f"a-{name}"}, {"slower_than": 1e6}, {"within": 1e-9}]
        [seen] = [
            row.record for row in cast("TransferList", a.ask(ListTransfers(engine_id=f"a-{name}"))).rows
        ]
        filters += [{"request_id": seen.request_id}, {"code": seen.code}]
        hidden = {cast("TransferList", b.ask(ListTransfers(limit=10, **given))).hidden for given in filters}
        assert hidden == {cast("TransferList", b.ask(ListTransfers())).hidden}, (
            "it would say whether one matches"
        )
        assert min(hidden) > 0


def test_root_sees_all_and_events_are_its_own(private: Daemon) -> None:
    with readers(private) as (_, _, name):
        listed = private.ask(ListTransfers(limit=1000))
        assert isinstance(listed, TransferList)
        assert {f"a-{name}", f"b-{name}"} <= {row.record.local_engine for row in listed.rows}
        assert listed.hidden == 0
        assert not any(row.hidden for row in private.engines().values())
        events = private.directory / "events.sock"
        assert stat.S_IMODE(events.stat().st_mode) == 0o600


def test_who_takes_a_name_that_another_had_does_not_see_what_was_recorded_under_it(private: Daemon) -> None:
    with readers(private) as (a, b, name):
        a.end()
        wait_for(lambda: private.engines()[f"a-{name}"].state == "partial")
    with other_user(private, ATTACKER) as b:
        wait_for(lambda: private.engines()[f"a-{name}"].state == "gone")
        assert isinstance(b.ask(worker(facts(f"a-{name}"))), Registered)
        listed = b.ask(ListTransfers(engine_id=f"a-{name}"))
        assert isinstance(listed, TransferList)
        assert listed.rows == ()


def test_by_default_members_of_the_group_see_all(host: Daemon) -> None:
    with readers(host) as (_, b, name):
        listed = b.ask(ListTransfers(limit=1000))
        assert isinstance(listed, TransferList)
        assert {f"a-{name}", f"b-{name}"} <= {row.record.local_engine for row in listed.rows}
        engines = b.ask(ListEngines())
        assert isinstance(engines, EngineList)
        assert not any(row.hidden for row in engines.rows)
