"""Sessions against a real kvd that is killed, stopped and started again."""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from concurrent.futures import Future, wait
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import zmq

from kvd.client.alarm import Alarm
from kvd.client.errors import ClientError, RefusedByDaemon, TimedOut, Unreachable
from kvd.client.mailbox import Mailbox, Pending
from kvd.client.session import KvdSession
from kvd.wire.frame import WIRE_VERSION, Message, decode, encode
from kvd.wire.handshake import GetPeer
from kvd.wire.identity import LeaseKey
from kvd.wire.lease import LeaseClaim, LeaseClaimed, LeaseOpened
from kvd.wire.query import GetStatus, KvdStatus, ListWorkers
from kvd.wire.registration import OpenLease, Registered
from kvd.wire.reply import Ok
from kvd.wire.transfer import ListTransfers, ReportTransfers, TransferList, TransferRecord
from tests.support.daemons import daemons, facts, measured, scheduler, session, wait_for, worker
from tests.support.raising import raises

SESSIONS = 20


def record(number: int) -> TransferRecord:
    return TransferRecord(
        transfer_id=f"t{number}", request_id=f"r{number}", local_engine="e", local_rank="tp0", remote_engine="p",
        remote_generation="g", remote_request_id=f"p{number}", backend="direct", mode="pull", state="done",
    )  # fmt: skip


def test_all_sessions_register_again_after_a_sigkill() -> None:
    with daemons() as (kvd,), ExitStack() as stack:
        engine = facts("e", tp=SESSIONS)
        sessions = [stack.enter_context(session(kvd, worker(engine, rank))) for rank in range(SESSIONS)]
        generation = sessions[0].wait(lambda s: bool(s.engine_generation), 20).engine_generation
        before = sessions[0].state.kvd_generation
        kvd.kill()
        for one in sessions:
            assert not one.wait(lambda s: not s.connected, 20).connected
        kvd.start(wait=False)
        wait_for((kvd.directory / "kvd.sock").exists)
        wait_for(lambda: kvd.log.count("serving") == 2, 20)
        began = time.monotonic()
        for one in sessions:
            one.wait(lambda s: s.connected and s.kvd_generation != before and bool(s.engine_generation), 20)
        measured(f"{SESSIONS} sessions registered again after kvd serves", time.monotonic() - began)
        assert sessions[0].state.engine_generation == generation
        assert kvd.engines()["e"].state == "ready"


def test_nothing_delivered_is_lost_when_kvd_is_killed_in_between() -> None:
    with daemons() as (kvd,), session(kvd, worker(facts("e"), incarnation="i")) as one:
        futures = [
            one.deliver(f"r{n}", ReportTransfers(incarnation="i", records=(record(n),))) for n in range(100)
        ]
        kvd.kill()
        futures += [
            one.deliver(f"r{n}", ReportTransfers(incarnation="i", records=(record(n),)))
            for n in range(100, 200)
        ]
        kvd.start()
        assert not wait(futures, 20).not_done
        assert {type(f.result()) for f in futures} == {Ok}
        rows = kvd.ask(ListTransfers(limit=1000))
        assert isinstance(rows, TransferList)
        assert sorted(r.record.transfer_id for r in rows.rows) == sorted(f"t{n}" for n in range(200))


def test_a_call_made_while_kvd_is_away_is_answered_when_it_is_back() -> None:
    with daemons() as (kvd,), session(kvd, worker(facts("e"))) as one:
        kvd.kill()
        one.wait(lambda s: not s.connected, 20)
        future = one.call(GetStatus(), 20)
        kvd.start()
        assert isinstance(future.result(20), KvdStatus)


def sent_by_its_caller(one: KvdSession, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a call goes out without the session's thread, which may be at work just when one is made."""
    posted: list[Pending] = []
    post = Mailbox.post

    def noted(box: Mailbox, pending: Pending) -> bool:
        posted.append(pending)
        return post(box, pending)

    calls = 20
    with monkeypatch.context() as patched:
        patched.setattr(Mailbox, "post", noted)
        for _ in range(calls):
            assert isinstance(one.call(GetStatus(), 20).result(20), KvdStatus)
    return len(posted) < calls


def test_a_call_is_sent_by_its_caller_where_nothing_is_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with daemons() as (kvd,), session(kvd, worker(facts("e"))) as one:
        one.wait(lambda s: s.connected, 20)
        assert sent_by_its_caller(one, monkeypatch)


def test_a_delivery_is_sent_by_its_caller_too() -> None:
    threads: set[str] = set()

    def fresh() -> LeaseOpened:
        threads.add(threading.current_thread().name)
        return LeaseOpened(engine_id="e", leases=())

    with daemons() as (kvd,), session(kvd, scheduler(facts("e"))) as one:
        one.wait(lambda s: s.connected, 20)
        for number in range(20):
            assert one.deliver(f"lease {number}", fresh).result(20) == Ok()
    assert threading.current_thread().name in threads


def test_a_delivery_does_not_overtake_an_older_one_with_its_key() -> None:
    """That is put off, and nobody has taken it out of the inbox yet: it would take the newer one's place."""
    with daemons() as (kvd,), session(kvd, scheduler(facts("e"))) as one:
        one.wait(lambda s: s.connected, 20)
        older = one.deliver("lease", LeaseOpened(engine_id="e", leases=()), after=60.0)
        newer = one.deliver("lease", LeaseOpened(engine_id="e", leases=()))
        assert newer.result(20) == Ok()
        with raises("KVD-CLIENT", match="newer delivery 'lease'"):
            older.result(20)


def test_nothing_is_sent_past_what_is_due_nor_once_its_time_is_over() -> None:
    with daemons() as (kvd,), session(kvd, scheduler(facts("e"))) as one:
        one.wait(lambda s: s.connected, 20)
        one.deliver("lease", LeaseOpened(engine_id="e", leases=()), after=60.0)
        one.deliver("other", LeaseOpened(engine_id="e", leases=())).result(20)
        wait_for(lambda: not one._mailbox.inbox)
        now = time.monotonic()
        assert not one._side.send_now(Pending(GetStatus(), Future(), now, 0.0))
        call = Pending(GetStatus(), Future(), now + 20.0, 20.0)
        with one._side._turn:  # so that the session's thread does not send it first
            (put_off,) = (kept for kept in one._side.waiting.values() if kept.key == "lease")
            put_off.due = now
            assert one._side._any_before(call, time.monotonic())
            put_off.due = now + 60.0
            assert not one._side._any_before(call, time.monotonic())


def test_a_call_from_within_a_push_is_answered_after_it() -> None:
    """The thread that would read the answer is the one that calls."""
    called: list[Future[Message]] = []

    def on_push(_: Message) -> None:
        called.append(one.call(GetStatus(), 20))

    with daemons() as (kvd,), session(kvd, scheduler(facts("e"), (OpenLease("r", 30.0),)), on_push) as one:
        one.wait(lambda s: s.connected, 20)
        claim = LeaseClaim(key=LeaseKey(engine_id="e", request_id="r"), reader="one", extend_seconds=60)
        assert isinstance(one.call(claim, 20).result(20), LeaseClaimed)
        assert isinstance(called[0].result(20), KvdStatus)


def test_what_is_put_off_keeps_no_call_from_being_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with daemons() as (kvd,), session(kvd, worker(facts("e"))) as one:
        one.wait(lambda s: s.connected, 20)
        later = one.deliver("later", GetStatus(), after=60.0)
        assert sent_by_its_caller(one, monkeypatch)
        assert not later.done()


def test_a_call_that_kvd_has_no_room_for_is_sent_when_it_has() -> None:
    """Its caller does not wait: the session's thread sends what is left of it."""
    most = ReportTransfers(incarnation="i", records=tuple(record(number) for number in range(100)))
    with daemons() as (kvd,), session(kvd, worker(facts("e"), incarnation="i")) as one:
        one.wait(lambda s: s.connected, 20)
        kvd.signal(signal.SIGSTOP)
        asked = [one.call(most, 60) for _ in range(200)]
        kvd.signal(signal.SIGCONT)
        assert {type(each.result(60)) for each in asked} == {Ok}


def test_calls_of_many_threads_each_get_their_own_answer() -> None:
    threads, calls = 8, 150
    found: list[tuple[int, int]] = []
    with daemons() as (kvd,), session(kvd, worker(facts("e"))) as one:
        one.wait(lambda s: s.connected, 20)

        def ask(number: int) -> None:
            for at in range(calls):
                name = f"{number}-{at}"
                key = LeaseKey(engine_id="nobody", request_id=name)
                answer = one.call(LeaseClaim(key=key, reader=name), 20).result(20)
                assert isinstance(answer, LeaseClaimed)
                assert answer.request_id == name
                found.append((number, at))

        asking = [threading.Thread(target=ask, args=(number,)) for number in range(threads)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(60)
        assert len(set(found)) == threads * calls


def test_calls_end_with_the_error_that_fits() -> None:
    with daemons() as (kvd,), session(kvd, worker(facts("e"))) as one:
        with pytest.raises(RefusedByDaemon, match="no engine 'x'"):
            one.call(GetPeer(local_engine="x", engine_id="y"), 20).result(20)
        kvd.signal(signal.SIGSTOP)
        with pytest.raises(TimedOut, match=r"0\.2 s"):
            one.call(GetStatus(), 0.2).result(20)
        one.wait(lambda s: not s.connected, 20)
        kvd.signal(signal.SIGCONT)
        one.wait(lambda s: s.connected, 20)
        kvd.kill()
        one.wait(lambda s: not s.connected, 20)
        with pytest.raises(Unreachable, match=r"kvd\.sock"):
            one.call(GetStatus(), 0.1).result(20)


def test_a_refused_delivery_is_kept_and_made_afresh_for_each_sending() -> None:
    made: list[int] = []

    def fresh() -> Message:
        made.append(len(made))
        return LeaseOpened(engine_id="e" if len(made) > 1 else "other", leases=(OpenLease("r", 30.0),))

    with daemons() as (kvd,), session(kvd, scheduler(facts("e"))) as one:
        assert one.deliver("lease", fresh).result(10) == Ok()
        assert made == [0, 1]
        assert one.counters["deliveries.refused"] == 1


def test_a_delivery_is_dropped_and_counted_after_its_time() -> None:
    with daemons() as (kvd,), session(kvd, worker(facts("e"))) as one:
        future = one.deliver("k", LeaseOpened(engine_id="e", leases=()), keep_seconds=0.3)
        with pytest.raises(TimedOut):
            future.result(20)
        assert one.counters["deliveries.dropped"] == 1


def test_a_delivery_that_is_put_off_is_sent_then_or_at_the_end() -> None:
    with daemons() as (kvd,), session(kvd, scheduler(facts("e"))) as one:
        message = LeaseOpened(engine_id="e", leases=())
        began = time.monotonic()
        assert one.deliver("soon", message, after=0.3).result(20) == Ok()
        assert time.monotonic() - began >= 0.3
        late = one.deliver("late", message, after=60.0)
        one.close()
        assert late.result(0) == Ok()


def test_what_is_put_off_does_not_wake_the_thread_before(tmp_path: Path) -> None:
    thread, others = os.eventfd(0, os.EFD_NONBLOCK), Alarm()
    box = Mailbox(str(tmp_path), "test", lambda: worker(facts("e")), None, thread, others)
    try:
        due = time.monotonic() + 0.5
        assert box.post(Pending(GetStatus(), Future(), math.inf, math.inf, due=due))
        assert select.select([thread, others.fileno()], [], [], 0)[0] == []
        assert select.select([thread, others.fileno()], [], [], 10)[0] == [others.fileno()]
        assert time.monotonic() >= due
        box.woken()
        assert box.post(Pending(GetStatus(), Future(), math.inf, math.inf))
        assert select.select([thread, others.fileno()], [], [], 0)[0] == [thread]
        box.woken()
        assert select.select([thread, others.fileno()], [], [], 0)[0] == []
    finally:
        box.end()
        box.ended()


def test_a_newer_delivery_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    lonely = KvdSession(lambda: worker(facts("e")), directory=tmp_path)
    older = lonely.deliver("k", GetStatus())
    lonely.deliver("k", ListWorkers())
    with raises("KVD-CLIENT", match="newer delivery 'k'"):
        older.result(20)
    lonely.close()


def test_a_failing_push_handler_and_a_failing_card_do_not_end_the_session() -> None:
    failing = [True]

    def card() -> object:
        if failing:
            failing.clear()
            raise RuntimeError("no card yet")
        return scheduler(facts("e"), (OpenLease("r", 30.0),), incarnation="one")

    def on_push(_message: Message) -> None:
        raise ValueError("handler")

    with daemons() as (kvd,):
        one = KvdSession(card, on_push, directory=kvd.directory)  # type: ignore[arg-type]
        one.wait(lambda s: s.connected, 20)
        claim = LeaseClaim(key=LeaseKey(engine_id="e", request_id="r"), reader="one", extend_seconds=60)
        answer = one.call(claim, 20).result(20)
        assert "did not confirm: ValueError: handler" in str(answer)
        assert one.counters["push.errors"] >= 1
        assert one.counters["errors"] == 1
        assert one.state.connected
        one.close()


def test_a_session_can_be_closed_while_kvd_is_away(tmp_path: Path) -> None:
    lonely = KvdSession(lambda: worker(facts("e")), directory=tmp_path)
    began = time.monotonic()
    lonely.close()
    assert time.monotonic() - began < 10  # kvd is away: it would wait for ever
    with pytest.raises(ClientError, match="closed"):
        lonely.call(GetStatus(), 1).result(1)


def test_what_is_said_while_another_thread_closes_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look whether the session is open and the word to its thread, in which a step may be held up."""
    one = KvdSession(lambda: worker(facts("e")), directory=tmp_path)
    closer, write = threading.Thread(target=one.close), os.eventfd_write

    def held_up(fd: int, value: int) -> None:
        if threading.current_thread() is threading.main_thread():
            closer.start()
            closer.join(0.5)  # where it is not kept waiting, it closes what is about to be written to
        write(fd, value)

    with monkeypatch.context() as patched:
        patched.setattr(os, "eventfd_write", held_up)
        future = one.call(GetStatus(), 30)
    with pytest.raises(ClientError, match="closed"):
        future.result(10)
    closer.join()
    with pytest.raises(ClientError, match="closed"):
        one.call(GetStatus(), 30).result(0)


def test_close_says_goodbye() -> None:
    with daemons() as (kvd,):
        with session(kvd, worker(facts("e"))):
            assert [w.state for w in kvd.workers()] == ["alive"]
        (row,) = kvd.workers()
        assert (row.state, row.reason) == ("gone", "it said goodbye")


def test_a_session_inherited_over_a_fork_refuses_and_a_new_one_works() -> None:
    with daemons() as (kvd,), session(kvd, worker(facts("parent"))) as parent:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                refused = isinstance(parent.call(GetStatus(), 1).exception(1), ClientError)
                own = KvdSession(lambda: worker(facts("child")), directory=kvd.directory)
                own.wait(lambda s: s.connected, 10)
                own.close()
                code = 0 if refused else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert parent.state.connected


def test_two_living_workers_cannot_hold_one_rank() -> None:
    with daemons() as (kvd,), session(kvd, worker(facts("e"))):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                own = KvdSession(lambda: worker(facts("e")), directory=kvd.directory)
                state = own.wait(lambda s: s.refusal is not None, 10)
                assert state.refusal is not None
                code = 0 if state.refusal.code == "KVD-RANK-TAKEN" else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_message_that_cannot_be_encoded_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    too_large = ListTransfers(limit=1 << 70)

    def broken() -> Message:
        raise ValueError("no such lease")

    with daemons() as (kvd,), session(kvd, worker(facts("e"))) as one:
        bad = [one.deliver("bad", too_large), one.call(too_large, 30.0), one.deliver("broken", broken)]
        assert isinstance(one.call(GetStatus(), 20.0).result(20), KvdStatus)
        for future in bad:
            with raises("KVD-UNENCODABLE"):
                future.result(20)
        assert "no such lease" in str(bad[2].exception())
        wait_for(lambda: one.counters["unencodable"] == 3)
        assert one.counters["errors"] == 0
        assert one.state.connected
    assert sum("cannot be encoded" in record.message for record in caplog.records) == 3


def test_an_answer_that_cannot_be_encoded_is_a_refusal() -> None:
    with (
        daemons() as (kvd,),
        session(kvd, worker(facts("e")), on_push=lambda _: ListTransfers(limit=1 << 70)) as one,
    ):
        prefiller = LeaseKey(engine_id="e", request_id="r")
        with session(kvd, scheduler(facts("e")), on_push=lambda _: ListTransfers(limit=1 << 70)) as owner:
            owner.call(LeaseOpened(engine_id="e", leases=(OpenLease("r", 30.0),)), 20.0).result(20)
            claimed = one.call(LeaseClaim(key=prefiller, reader="x", extend_seconds=60.0), 20.0).result(20)
            assert isinstance(claimed, LeaseClaimed)
            assert "cannot be encoded" in claimed.reason
            assert owner.counters["errors"] == 0


def test_an_answer_that_cannot_be_read_ends_its_call_at_once(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as kvd:
        kvd.linger, kvd.rcvtimeo = 0, 20_000
        kvd.bind(f"ipc://{tmp_path}/kvd.sock")
        one = KvdSession(lambda: worker(facts("e")), directory=tmp_path)
        try:
            route, frame = kvd.recv_multipart()
            kvd.send_multipart(
                [route, encode(Registered(kvd_generation="g", heartbeat_seconds=60.0), decode(frame)[1])]
            )
            asked = one.call(GetStatus(), 60.0)
            while not isinstance((message := decode((received := kvd.recv_multipart())[1]))[0], GetStatus):
                pass
            kvd.send_multipart(
                [received[0], msgspec.msgpack.encode((WIRE_VERSION, message[1], {"type": "status"}))]
            )
            with raises("KVD-PROTOCOL", match="cannot be read: not a valid message of kind 'status'"):
                asked.result(20)
        finally:
            one.close()
