"""Orders to engines over a real kvd: who may give them, what is refused, and what is remembered of the others."""

from __future__ import annotations

import grp
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from kvd.client.session import KvdSession
from kvd.geometry.rank import Rank
from kvd.wire.event import KvdEvent
from kvd.wire.frame import Message
from kvd.wire.order import (
    AllWaiting,
    Asker,
    ClearForced,
    ForcedCleared,
    ForcedMisses,
    ForceMiss,
    ForcePlan,
    GetForced,
    LoadPart,
    Miss,
    NextLoads,
    OneRequest,
    OrderState,
    PlannedMiss,
    ReportForced,
)
from kvd.wire.reply import Ok, Refused
from tests.support.daemons import ROOT, Daemon, daemons, facts, scheduler, session, wait_for, worker

LONG = 30.0


def plan_of(order: ForceMiss) -> ForcePlan:
    """What an engine of one group says to an order, with one request that waits."""
    request = PlannedMiss(request_id="r", prefiller="p", loading=False, tokens=100, keeps=0, recomputes=100)
    return ForcePlan(
        order_id=order.asker.order_id, engine_id=order.engine_id, target=order.target, when=order.when,
        policy="recompute", mode="pull", groups=1, channel="blocks", carried_out=order.carry_out,
        requests=() if isinstance(order.target, NextLoads) else (request,),
    )  # fmt: skip


@dataclass
class Engine:
    """An engine of one worker whose scheduler answers orders."""

    daemon: Daemon
    told: list[Message] = field(default_factory=list)
    answer: Callable[[ForceMiss], Message] = plan_of
    session: KvdSession = field(init=False)

    def heard(self, message: Message) -> Message | None:
        """The scheduler's session."""
        if isinstance(message, ForceMiss):
            self.told.append(message)
            return self.answer(message)
        if isinstance(message, ClearForced):
            self.told.append(message)
            return ForcedCleared(("o1",))
        return None

    def order(self, **more: object) -> ForcePlan:
        """An order that is carried out."""
        given = {"engine_id": "d", "target": AllWaiting(), "carry_out": True, **more}
        plan = self.daemon.ask(ForceMiss(**given))  # type: ignore[arg-type]
        assert isinstance(plan, ForcePlan)
        return plan

    def refused(self, **more: object) -> Refused:
        given = {"engine_id": "d", "target": AllWaiting(), "carry_out": True, **more}
        return self.daemon.ask_refused(ForceMiss(**given))  # type: ignore[arg-type]

    def report(self, plan: ForcePlan, miss: Miss | None = None, **more: object) -> None:
        """What the scheduler says of an order."""
        order = self.order_of(plan.order_id).order
        order = msgspec.structs.replace(order, **more)
        report = ReportForced(order=order, miss=miss)
        assert self.session.call(report, LONG).result(LONG) == Ok()

    def order_of(self, order_id: str = "", **more: object) -> ForcedMisses:
        found = self.daemon.ask(GetForced(order_id=order_id, **more), LONG)  # type: ignore[arg-type]
        assert isinstance(found, ForcedMisses)
        return found


@contextmanager
def an_engine(*arguments: str) -> Iterator[Engine]:
    with daemons(1, *arguments) as (kvd,):
        engine = Engine(kvd)
        with session(kvd, worker(facts("d"))), session(kvd, scheduler(facts("d")), engine.heard) as made:
            engine.session = made
            yield engine


@pytest.fixture(scope="module")
def lasting() -> Iterator[Engine]:
    with an_engine() as made:
        yield made


@pytest.fixture
def engine(lasting: Engine) -> Engine:
    lasting.told.clear()
    lasting.answer = plan_of
    return lasting


def miss(state: str, *steps: str, **more: object) -> Miss:
    at = {name: float(number) for number, name in enumerate(steps)}
    return Miss(request_id="r", prefiller="p", state=state, tokens=100, steps=at, **more)  # type: ignore[arg-type]


def test_the_engine_is_told_who_asked_and_its_plan_is_the_answer(engine: Engine) -> None:
    plan = engine.order(carry_out=False)
    (told,) = engine.told
    assert isinstance(told, ForceMiss)
    assert told.asker == Asker(order_id=plan.order_id, uid=os.getuid(), pid=os.getpid())
    assert plan == plan_of(told)
    assert engine.daemon.ask_refused(GetForced(order_id=plan.order_id)).code == "KVD-ORDER-UNKNOWN"


def test_an_order_is_remembered_with_who_gave_it_and_told_as_an_event(engine: Engine) -> None:
    seen: list[KvdEvent] = []
    listening = threading.Event()
    with engine.daemon.operator() as operator:
        stream = operator.events(("order.",), LONG, lambda on: listening.set() if on else None)
        reader = threading.Thread(target=lambda: seen.extend(itertools.islice(stream, 1)))
        reader.start()
        assert listening.wait(LONG)
        plan = engine.order()
        reader.join(LONG)
    order = engine.order_of(plan.order_id).order
    assert (order.asker.uid, order.asker.pid) == (os.getuid(), os.getpid())
    assert (order.open, order.taken, order.plan) == (False, 1, plan)
    assert engine.order_of().order.plan.order_id == plan.order_id, "the newest one"
    (event,) = seen
    assert (event.kind, event.subject) == ("order.force_miss", "d")
    assert (event.detail["uid"], event.detail["pid"]) == (os.getuid(), os.getpid())


def test_a_miss_is_followed_step_by_step_whatever_order_reports_come_in(engine: Engine) -> None:
    plan = engine.order()
    before = engine.daemon.status().counters
    for state, steps in (
        ("ordered", ()),
        ("forced", ("forced",)),
        ("reported", ("forced", "quiesced", "reported")),
        ("forced", ("forced",)),
        ("recovered", ("forced", "quiesced", "reported", "rescheduled", "first_token")),
        ("reported", ("forced", "quiesced", "reported")),
    ):
        engine.report(plan, miss(state, *steps))
    (found,) = engine.order_of(plan.order_id).misses
    assert (found.state, len(found.steps)) == ("recovered", 5)
    after = engine.daemon.status().counters
    for state in ("ordered", "forced", "reported", "recovered"):
        assert after[f"miss.{state}"] - before.get(f"miss.{state}", 0) == 1


def test_an_order_for_further_loads_only_goes_on(engine: Engine) -> None:
    plan = engine.order(target=NextLoads(count=5))
    assert engine.order_of(plan.order_id).order.open
    engine.report(plan, looked=3, taken=2)
    engine.report(plan, looked=5, taken=4, open=False)
    engine.report(plan, looked=1, taken=1, open=True)
    order = engine.order_of(plan.order_id).order
    assert (order.open, order.looked, order.taken) == (False, 5, 4)


def test_one_whose_time_is_up_is_no_longer_open_though_an_idle_engine_says_nothing(engine: Engine) -> None:
    plan = engine.order(target=NextLoads(seconds=0.05))
    wait_for(lambda: not engine.order_of(plan.order_id).order.open)


def test_who_follows_is_told_when_something_changes_and_after_a_while_anyhow(engine: Engine) -> None:
    plan = engine.order()
    revision = engine.order_of(plan.order_id).revision
    assert engine.order_of(plan.order_id, revision=revision, seconds=0.05).revision == revision
    answers: list[ForcedMisses] = []
    asking = threading.Thread(
        target=lambda: answers.append(engine.order_of(plan.order_id, revision=revision, seconds=LONG))
    )
    asking.start()
    engine.report(plan, miss("forced", "forced"))
    asking.join(LONG)
    assert [m.state for m in answers[0].misses] == ["forced"]


def test_orders_are_cleared_by_the_engine(engine: Engine) -> None:
    assert engine.daemon.ask(ClearForced(engine_id="d")) == ForcedCleared(("o1",))


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"engine_id": "nobody"}, "KVD-ENGINE-UNKNOWN"),
        ({"target": OneRequest("")}, "KVD-BAD-ORDER"),
        ({"target": NextLoads(ratio=0.0)}, "KVD-BAD-ORDER"),
        ({"target": NextLoads(ratio=float("nan"))}, "KVD-WIRE-MALFORMED"),
        ({"target": NextLoads(count=-1)}, "KVD-BAD-ORDER"),
        ({"target": NextLoads(seconds=float("inf"))}, "KVD-WIRE-MALFORMED"),
        ({"part": LoadPart(rank=Rank(7))}, "KVD-FORCE-PART"),
        ({"part": LoadPart(group=3)}, "KVD-FORCE-PART"),
        ({"part": LoadPart(layer="layer.9")}, "KVD-FORCE-PART"),
        ({"part": LoadPart(layer="layer.0", group=1)}, "KVD-FORCE-PART"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_before_the_engine_hears_of_it(
    engine: Engine, given: dict[str, object], code: str
) -> None:
    assert engine.refused(**given).code == code
    assert engine.told == []


def test_a_part_that_the_engine_has_is_taken(engine: Engine) -> None:
    for part in (LoadPart(layer="layer.0"), LoadPart(group=0, rank=Rank(0))):
        engine.order(part=part)


def test_what_the_engine_refuses_is_passed_on_and_leaves_no_order(engine: Engine) -> None:
    newest = engine.order().order_id
    engine.answer = lambda _: Refused(code="KVD-FORCE-POLICY", message="fail", hint="restart")
    refusal = engine.refused()
    assert (refusal.code, refusal.message, refusal.hint) == ("KVD-FORCE-POLICY", "fail", "restart")
    assert engine.order_of().order.plan.order_id == newest


def test_only_the_engines_scheduler_may_report(engine: Engine) -> None:
    plan = engine.order()
    order = engine.order_of(plan.order_id).order
    assert engine.daemon.ask_refused(ReportForced(order=order)).code == "KVD-NOT-REGISTERED"
    with session(engine.daemon, worker(facts("x"))) as other:
        error = other.call(ReportForced(order=order), LONG).exception(LONG)
    assert getattr(error, "code", "") == "KVD-NOT-OWNER"


AS_NOBODY = """
import os, sys
sys.path[:0] = sys.argv[1].split(":")
from pathlib import Path
from kvd.client.errors import RefusedByDaemon
from kvd.client.operator import connect
from kvd.wire.order import AllWaiting, ClearForced, ForceMiss
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for message in (ForceMiss(engine_id="d", target=AllWaiting()), ClearForced(engine_id="d")):
    with connect(Path(sys.argv[2]), 10.0) as operator:
        try:
            print("allowed", type(operator.ask(message)).__name__)
        except RefusedByDaemon as error:
            print(error.code)
"""


def open_to_all(path: Path) -> None:
    """The daemon itself is to say no, and not the modes of its files."""
    for folder in (path, *path.parents[:-2]):
        folder.chmod(0o755)
    (path / "kvd.sock").chmod(0o777)


def as_nobody(engine: Engine) -> list[str]:
    """What another user is told."""
    open_to_all(engine.daemon.directory)
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, f"{ROOT / 'daemon'}:{ROOT}", str(engine.daemon.directory)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_may_not_give_orders_unless_of_the_group_that_may(tmp_path: Path) -> None:
    with an_engine() as engine:
        assert as_nobody(engine) == ["KVD-NOT-PERMITTED"] * 2
        assert engine.told == []
        assert engine.daemon.status().counters["orders.refused"] == 1
    settings = tmp_path / "kvd.yaml"
    settings.write_text(f"orders: {{group: {grp.getgrgid(65534).gr_name}}}\n")
    with an_engine("--config", str(settings)) as engine:
        assert as_nobody(engine) == ["allowed ForcePlan", "allowed ForcedCleared"]


def test_an_engine_that_ends_carries_nothing_out_any_more() -> None:
    with daemons(1, "--config", os.devnull) as (kvd,):
        engine = Engine(kvd)
        with session(kvd, worker(facts("d"))), session(kvd, scheduler(facts("d")), engine.heard) as made:
            engine.session = made
            plan = engine.order(target=NextLoads())
            assert engine.order_of(plan.order_id).gone == ""
        assert wait_for(lambda: engine.order_of(plan.order_id).gone, 20.0)


def test_a_scheduler_that_does_not_answer_is_a_refusal(engine: Engine) -> None:
    def hang(order: ForceMiss) -> Message:
        time.sleep(3.5)  # longer than kvd waits
        return plan_of(order)

    engine.answer = hang
    assert engine.refused().code == "KVD-WORKER-AWAY"


def test_reports_to_a_kvd_that_was_killed_teach_the_next_one() -> None:
    with daemons() as (kvd,):
        engine = Engine(kvd)
        with session(kvd, worker(facts("d"))), session(kvd, scheduler(facts("d")), engine.heard) as made:
            engine.session = made
            plan = engine.order()
            order = engine.order_of(plan.order_id).order
            kvd.kill()
            told = made.deliver("m", ReportForced(order=order, miss=miss("forced", "forced")))
            kvd.start()
            assert told.result(LONG) == Ok()
            found = engine.order_of(plan.order_id)
    assert isinstance(found.order, OrderState)
    assert [m.state for m in found.misses] == ["forced"]
