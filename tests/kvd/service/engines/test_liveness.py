"""Workers that are killed, stopped, or that contradict each other."""

from __future__ import annotations

import asyncio
import signal
import time
from types import SimpleNamespace
from typing import cast

import zmq

from kvd.service.config import LivenessSettings
from kvd.service.engines.liveness import Liveness
from kvd.service.engines.registry import Registry
from kvd.wire.frame import decode, encode
from kvd.wire.handshake import GetPeer, PeerGone, PeerReady
from kvd.wire.identity import LeaseKey
from kvd.wire.lease import LeaseClaim, LeaseClaimed
from kvd.wire.registration import Heartbeat, NotRegistered, Registered
from kvd.wire.reply import Refused
from tests.support.daemons import daemons, facts, measured, process, scheduler, session, wait_for, worker


def test_a_killed_worker_is_gone_at_once_and_its_users_are_told() -> None:
    told: list[tuple[float, object]] = []
    with (
        daemons() as (kvd,),
        process(kvd, "p") as child,
        session(kvd, worker(facts("d")), lambda m: told.append((time.monotonic(), m))) as one,
    ):
        ready = one.call(GetPeer(local_engine="d", engine_id="p"), 10).result(10)
        assert isinstance(ready, PeerReady)
        assert ready.peer.workers[0].pid != kvd.pid
        began = time.monotonic()
        child.kill()
        at, message = wait_for(lambda: next((t for t in told if isinstance(t[1], PeerGone)), None))
        measured("a killed worker is told of", at - began)
        assert at - began < 5  # without a look at its process it would be silent after 1 s, and gone after 10
        assert isinstance(message, PeerGone)
        assert message.generation == ready.peer.generation
        assert "ended" in message.reason
        assert kvd.engines()["p"].state == "gone"
        assert one.call(GetPeer(local_engine="d", engine_id="p"), 10).exception(10) is not None


def test_a_stopped_worker_is_silent_and_alive_again_when_it_goes_on() -> None:
    with daemons() as (kvd,), process(kvd, "p") as child:
        child.send_signal(signal.SIGSTOP)
        wait_for(lambda: kvd.workers()[0].state == "silent")
        assert "no heartbeat" in kvd.workers()[0].reason
        assert kvd.engines()["p"].state == "ready"
        child.send_signal(signal.SIGCONT)
        wait_for(lambda: kvd.workers()[0].state == "alive")


def test_a_kvd_that_was_stopped_itself_blames_nobody() -> None:
    with daemons() as (kvd,), session(kvd, worker(facts("e"))) as one:
        kvd.signal(signal.SIGSTOP)
        one.wait(lambda s: not s.connected, 10)
        time.sleep(1.5)
        kvd.signal(signal.SIGCONT)
        one.wait(lambda s: s.connected, 10)
        counters = kvd.status().counters
        assert "events.worker.gone" not in counters
        assert "events.worker.silent" not in counters


def test_an_error_at_one_end_leaves_none_of_the_others_alive() -> None:
    """Several processes may end at once; after an error nothing was ended any more."""
    over: list[str] = []

    def end(client: SimpleNamespace, reason: str, *, ended: bool) -> None:
        assert ended
        if client.name == "b":
            raise ValueError(reason)
        over.append(client.name)

    clients = {name: SimpleNamespace(name=name, process=7) for name in "abcd"}
    registry = SimpleNamespace(clients=clients, end=end)

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        liveness = Liveness(cast("Registry", registry), LivenessSettings())
        for name in "abcd":
            liveness._end_soon([name], 7)
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(work())
    assert over == ["a", "c", "d"]


def test_leases_end_with_their_scheduler() -> None:
    with daemons() as (kvd,), process(kvd, "p", role="scheduler") as child:
        child.kill()
        wait_for(lambda: [w.state for w in kvd.workers()] == ["gone"])
    with daemons() as (kvd,), session(kvd, scheduler(facts("d"))) as decoder:
        claim = LeaseClaim(key=LeaseKey(engine_id="p", request_id="r"), reader="one")
        answer = decoder.call(claim, 10).result(10)
        assert isinstance(answer, LeaseClaimed)
        assert answer.seconds == 0
        assert "'r'" in answer.reason


def test_an_engine_is_partial_until_all_its_workers_are_here() -> None:
    with daemons() as (kvd,), session(kvd, worker(facts("e", tp=2))) as first:
        assert first.state.engine_generation == ""
        assert kvd.engines()["e"].state == "partial"
        with session(kvd, worker(facts("e", tp=2), 1)):
            first.wait(lambda s: bool(s.engine_generation), 20)
            assert kvd.engines(cards=True)["e"].card is not None
        wait_for(lambda: kvd.engines()["e"].state == "partial")


def test_cards_that_contradict_are_refused_with_both_values() -> None:
    with daemons() as (kvd,), session(kvd, worker(facts("e", tp=2))):
        other = kvd.ask_refused(worker(facts("e", tp=2, model="huge"), 1))
        assert other.code == "KVD-ENGINE-CONFLICT"
        assert "'huge'" in other.message
        assert "'tiny'" in other.message
        assert kvd.ask_refused(worker(facts("f", tp=2), 5)).code == "KVD-BAD-CARD"


def test_workers_of_one_engine_with_unlike_weights_are_refused() -> None:
    with daemons() as (kvd,), session(kvd, worker(facts("e", tp=2, weights="w1-0", weights_source="files"))):
        other = kvd.ask_refused(worker(facts("e", tp=2, weights="w1-1", weights_source="safetensors"), 1))
        assert (other.code, "weights is 'w1-1'" in other.message) == ("KVD-ENGINE-CONFLICT", True)


def test_a_worker_that_could_not_find_out_its_weights_is_of_its_engine_all_the_same() -> None:
    untold = facts("e", tp=2, weights_source="unknown: model.safetensors: No such file or directory")
    with daemons() as (kvd,), session(kvd, worker(facts("e", tp=2, weights="w1-0", weights_source="files"))):
        with session(kvd, worker(untold, 1)) as second:
            second.wait(lambda s: bool(s.engine_generation), 20)
        assert kvd.engines()["e"].engine.facts["weights"] == "w1-0"


def test_a_heartbeat_of_a_stranger_asks_for_the_card() -> None:
    with daemons() as (kvd,):
        assert isinstance(kvd.ask(Heartbeat(incarnation="stranger")), NotRegistered)


def test_a_client_that_misses_heartbeats_is_silent_until_the_next_one() -> None:
    card = scheduler(facts("e"))
    with daemons() as (kvd,), zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        sender.linger = 0
        sender.connect(f"ipc://{kvd.directory}/kvd.sock")
        sender.send(encode(card, 1))
        answer, _ = decode(sender.recv())
        assert isinstance(answer, Registered)
        wait_for(lambda: kvd.workers()[0].state == "silent")
        sender.send(encode(Heartbeat(incarnation=card.incarnation), 2))
        assert not isinstance(decode(sender.recv())[0], Refused)
        wait_for(lambda: kvd.workers()[0].state == "alive")
