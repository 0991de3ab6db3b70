"""Two kvds over loopback: handshakes, caches, invalidation, a peer that dies or is stopped, leases from afar."""

from __future__ import annotations

import signal
import time
from concurrent.futures import wait
from contextlib import ExitStack

import msgspec
import zmq

from kvd.client.errors import RefusedByDaemon
from kvd.client.remote import RemoteKvd, RemoteOperator
from kvd.wire.frame import Message, decode, encode
from kvd.wire.handshake import GetPeer, PeerGone, PeerReady, Ping, Pong
from kvd.wire.identity import Endpoint, LeaseKey
from kvd.wire.lease import (
    LeaseClaim,
    LeaseClaimed,
    LeaseConfirmed,
    LeaseEnded,
    LeaseExtend,
    LeaseOpened,
    LeaseRelease,
)
from kvd.wire.registration import Heartbeat, NotRegistered, OpenLease, Registered
from kvd.wire.reply import Ok
from tests.support.daemons import (
    Daemon,
    daemons,
    facts,
    geometry,
    measured,
    process,
    scheduler,
    session,
    wait_for,
    worker,
)
from tests.support.lender import Lender
from tests.support.ports import free_port


def ask_for(kvd: Daemon, generation: str = "") -> GetPeer:
    return GetPeer(local_engine="d", engine_id="p", endpoint=kvd.endpoint, generation=generation)


def test_a_kvd_tells_others_of_one_that_does_not_answer_it_until_that_answers() -> None:
    with daemons(2) as (near, far), ExitStack() as stack:
        stack.enter_context(session(far, worker(facts("p"))))
        one = stack.enter_context(session(near, worker(facts("d"))))
        one.wait(lambda s: bool(s.engine_generation), 20)
        assert isinstance(one.call(ask_for(far), 10).result(10), PeerReady)
        generation = far.status().generation
        third = stack.enter_context(RemoteOperator(RemoteKvd(near.host, near.port), 10))

        def silent() -> tuple[str, ...]:
            answer = third.ask(Ping(kvd_id="third", kvd_generation="g"))
            assert isinstance(answer, Pong)
            return tuple(name for name, _ in answer.silent)

        assert silent() == ()
        far.signal(signal.SIGSTOP)
        try:
            wait_for(lambda: silent() == (generation,))
        finally:
            far.signal(signal.SIGCONT)
        wait_for(lambda: silent() == ())


def test_one_flight_for_fifty_askers_and_a_cache_afterwards() -> None:
    pushed: list[Message] = []
    with daemons(2) as (near, far), ExitStack() as stack:
        stack.enter_context(session(far, worker(facts("p"))))
        engine = facts("d", tp=2)
        one = stack.enter_context(session(near, worker(engine, 0)))
        stack.enter_context(session(near, worker(engine, 1)))
        stack.enter_context(session(near, scheduler(engine), pushed.append))
        one.wait(lambda s: bool(s.engine_generation), 20)
        futures = [one.call(ask_for(far), 10) for _ in range(50)]
        assert not wait(futures, 20).not_done
        answers = [f.result() for f in futures]
        assert {type(a) for a in answers} == {PeerReady}
        counters = near.status().counters
        assert counters["handshakes.flights"] == 1
        assert far.status().counters["received.describe_engine"] == 1
        began = time.monotonic()
        again = one.call(ask_for(far), 10).result(10)
        assert isinstance(again, PeerReady)
        assert again.cached
        first = min(a.seconds for a in answers if isinstance(a, PeerReady))
        measured("first handshake", first)
        measured("cached handshake", time.monotonic() - began)
        assert wait_for(lambda: [m for m in pushed if isinstance(m, PeerReady)])
        assert near.engines()["p"].peers == ("d",)
        assert wait_for(lambda: far.engines()["p"].peers)[0] == near.status().kvd_id


def test_a_restarted_peer_engine_is_taken_back_and_fetched_anew() -> None:
    pushed: list[Message] = []
    with daemons(2) as (near, far), session(near, worker(facts("d")), pushed.append) as one:
        with process(far, "p") as child:
            old = one.call(ask_for(far), 10).result(10)
            assert isinstance(old, PeerReady)
            began = time.monotonic()
            child.kill()
            gone = wait_for(lambda: next((m for m in pushed if isinstance(m, PeerGone)), None))
            measured("a killed worker is told of across two kvds", time.monotonic() - began)
            assert "ended" in gone.reason  # no heartbeat was waited for
            assert gone.generation == old.peer.generation
        assert near.engines()["p"].state == "gone"
        with session(far, worker(facts("p"))):
            new = one.call(ask_for(far), 10).result(10)
            assert isinstance(new, PeerReady)
            assert new.peer.generation != old.peer.generation
            stale = one.call(ask_for(far, old.peer.generation), 10).exception(10)
            assert isinstance(stale, RefusedByDaemon)
            assert stale.code == "KVD-PEER-GENERATION"
            assert old.peer.generation in stale.message
            assert new.peer.generation in stale.message


def test_a_killed_peer_kvd_is_down_its_engines_go_on_and_it_comes_back() -> None:
    pushed: list[Message] = []
    with (
        daemons(2) as (near, far),
        session(far, worker(facts("p"))) as other,
        session(near, worker(facts("d")), pushed.append) as one,
    ):
        assert isinstance(one.call(ask_for(far), 10).result(10), PeerReady)
        far.kill()
        wait_for(lambda: near.status().peers[0].state == "down", 15)
        assert near.engines()["p"].state == "unreachable"
        still = one.call(ask_for(far), 10).result(10)
        assert isinstance(still, PeerReady)
        assert still.cached
        far.start()
        other.wait(lambda s: s.connected, 10)
        wait_for(lambda: near.status().peers[0].state == "up", 15)
        wait_for(lambda: near.engines()["p"].state == "ready")
        assert not [m for m in pushed if isinstance(m, PeerGone)]


def test_an_engine_that_ended_while_its_kvd_was_away_is_taken_back() -> None:
    pushed: list[Message] = []
    with daemons(2) as (near, far), session(near, worker(facts("d")), pushed.append) as one:
        with process(far, "p"):
            assert isinstance(one.call(ask_for(far), 10).result(10), PeerReady)
            far.kill()
        far.start()
        with session(far, worker(facts("p"))):
            assert wait_for(lambda: [m for m in pushed if isinstance(m, PeerGone)], 20)


def test_a_stopped_peer_kvd_ends_in_a_refusal_within_its_time() -> None:
    with (
        daemons(2) as (near, far),
        session(near, worker(facts("d"))) as one,
        session(far, worker(facts("p"))),
    ):
        far.signal(signal.SIGSTOP)
        began = time.monotonic()
        error = one.call(ask_for(far), 20).exception(20)
        assert isinstance(error, RefusedByDaemon)
        assert error.code == "KVD-PEER-UNREACHABLE"
        assert f"127.0.0.1:{far.port}" in error.message
        assert time.monotonic() - began < 15  # the call's own time is 20
        far.signal(signal.SIGCONT)
        wait_for(lambda: near.status().peers[0].state == "up", 15)
        assert isinstance(one.call(ask_for(far), 10).result(10), PeerReady)


def test_who_waits_for_a_kvd_that_is_taken_to_be_down_waits_no_longer() -> None:
    nobody = Endpoint("127.0.0.1", free_port())
    with daemons(1) as (near,), ExitStack() as stack:
        near.stop()
        near.environment |= {"KVD_PEER_DOWN_SECONDS": "1.5", "KVD_PEER_HANDSHAKE_SECONDS": "600"}
        near.start()
        one = stack.enter_context(session(near, worker(facts("d"))))
        refused = one.call(GetPeer(local_engine="d", engine_id="p", endpoint=nobody), 60).exception(60)
        assert isinstance(refused, RefusedByDaemon)
        assert (refused.code, "is down: no connection" in refused.message) == ("KVD-PEER-UNREACHABLE", True)


def test_incompatible_engines_are_refused_factor_by_factor() -> None:
    with (
        daemons(2) as (near, far),
        session(near, worker(facts("d", cache_dtype="bfloat16"))) as one,
        session(far, worker(facts("p", model="other", cache_dtype="fp8"))),
    ):
        error = one.call(ask_for(far), 10).exception(10)
        assert isinstance(error, RefusedByDaemon)
        assert error.code == "KVD-INCOMPATIBLE"
        model = next(f for f in error.factors if f.name == "model")
        assert (model.local, model.remote) == ("tiny", "other")
        assert "tiny" in error.message


def test_other_weights_are_refused_with_both_values_and_the_next_step() -> None:
    with (
        daemons(2) as (near, far),
        session(near, worker(facts("d", weights="w1-00112233445566aa"))) as one,
        session(far, worker(facts("p", weights="w1-ffeeddccbbaa9988"))),
    ):
        error = one.call(ask_for(far), 10).exception(10)
        assert isinstance(error, RefusedByDaemon)
        assert error.message == (
            "d cannot read from p: weights is w1-00112233445566aa here and w1-ffeeddccbbaa9988 there"
        )
        assert 'set "weights" in kv_connector_extra_config of both to one id' in error.hint
        assert "`kvctl describe-topology d p`" in error.hint


def test_blocks_that_no_plan_fits_are_refused_with_what_does_not_fit() -> None:
    other = worker(facts("p"))
    card = msgspec.structs.replace(other.card, geometry=geometry(dtype="int32"))
    other = msgspec.structs.replace(other, card=card)
    with daemons(2) as (near, far), session(near, worker(facts("d"))) as one, session(far, other):
        error = one.call(ask_for(far), 10).exception(10)
        assert isinstance(error, RefusedByDaemon)
        assert error.message == (
            "d cannot read from p: field k is float32 (4 bytes) here and int32 (4 bytes) there"
        )


def test_one_models_weights_under_two_names_are_ready() -> None:
    with (
        daemons(2) as (near, far),
        session(near, worker(facts("d", weights="w1-00112233445566aa"))) as one,
        session(far, worker(facts("p", model="other", weights="w1-00112233445566aa"))),
    ):
        assert isinstance(one.call(ask_for(far), 10).result(10), PeerReady)


def test_leases_are_claimed_extended_and_released_from_afar() -> None:
    ended: list[Message] = []

    def owner(message: Message) -> Message | None:
        ended.append(message)
        if isinstance(message, LeaseExtend):
            return LeaseClaimed(request_id=message.request_id, seconds=message.seconds)
        return None

    with (
        daemons(2) as (near, far),
        session(far, scheduler(facts("p")), owner) as prefiller,
        session(near, scheduler(facts("d"))) as decoder,
    ):
        prefiller.call(LeaseOpened(engine_id="p", leases=(OpenLease("r", 20.0, 3),)), 20).result(20)
        key = LeaseKey(engine_id="p", request_id="r", endpoint=far.endpoint)
        claimed = decoder.call(LeaseClaim(key=key, reader="one"), 20).result(20)
        assert isinstance(claimed, LeaseClaimed)
        assert 15 < claimed.seconds <= 20
        extended = decoder.call(LeaseClaim(key=key, reader="one", extend_seconds=30), 20).result(20)
        assert isinstance(extended, LeaseClaimed)
        assert 29 < extended.seconds <= 30.1
        assert far.engines()["p"].leases == 1
        assert decoder.deliver("release", LeaseRelease(key=key, reader="one")).result(20) == Ok()
        assert wait_for(lambda: [m for m in ended if isinstance(m, LeaseEnded)]) == [
            LeaseEnded(request_id="r", end="released")
        ]
        after = decoder.call(LeaseClaim(key=key, reader="one"), 20).result(20)
        assert isinstance(after, LeaseClaimed)
        assert (after.seconds, "released" in after.reason) == (0, True)
        counters = far.status().counters
        assert (counters["leases.opened"], counters["leases.released"]) == (1, 1)


def test_workers_hear_at_once_that_a_claim_of_their_scheduler_was_confirmed() -> None:
    """Only of a prefiller that is of the generation which the claim names: leases have names alone.

    The scheduler hears so with the answer.
    """
    told: list[Message] = []

    def confirmed() -> list[Message]:
        return [message for message in told if isinstance(message, LeaseConfirmed)]

    leases = (OpenLease("r", 30.0, 3),)
    with (
        daemons(2) as (near, far),
        session(far, worker(facts("p"))) as prefiller,
        session(far, scheduler(facts("p"), leases, digest_key=b"k" * 32)),
        session(near, worker(facts("d")), told.append),
        session(near, worker(facts("other")), told.append),
        session(near, scheduler(facts("d"))) as decoder,
    ):
        generation = prefiller.wait(lambda s: bool(s.engine_generation), 20).engine_generation
        decoder.wait(lambda s: bool(s.engine_generation), 20)

        def claim(reader: str, of: str, name: str = "r", *, alone: bool = False) -> tuple[bool, str]:
            """Whether it is kept, and of which generation kvd says the prefiller to be."""
            key = LeaseKey(engine_id="p", request_id=name, endpoint=far.endpoint)
            asked = LeaseClaim(key=key, reader=reader, generation=of, alone=alone)
            answer = decoder.call(asked, 20).result(20)
            assert isinstance(answer, LeaseClaimed)
            kept.append(answer.seconds)
            return answer.seconds > 0, answer.generation

        kept: list[float] = []
        assert claim("stranger", generation) == (True, ""), "this kvd has not met the prefiller yet"
        decoder.call(msgspec.structs.replace(ask_for(far), keyed=True), 20).result(20)
        assert claim("plain", "") == (True, "")
        assert claim("older", "another generation") == (True, "")
        assert claim("gone", generation, "never opened") == (False, "")
        assert claim("at hand", generation, alone=True) == (True, generation)
        assert claim("mine", generation) == (True, generation)
        assert wait_for(confirmed) == [LeaseConfirmed(reader="mine", seconds=kept[-1])]


def test_on_one_host_kvd_says_so_to_whom_it_gave_the_prefiller_and_to_nobody_else() -> None:
    """Whoever was not given it is not told of its end, and has to ask for it."""
    with (
        daemons() as (kvd,),
        session(kvd, worker(facts("p", role="decode"))) as prefiller,  # which kvd gives nobody by itself
        session(kvd, scheduler(facts("p", role="decode"), (OpenLease("r", 30.0, 3),), digest_key=b"k" * 32)),
        session(kvd, worker(facts("d"))),
        session(kvd, scheduler(facts("d"))) as decoder,
    ):
        generation = prefiller.wait(lambda s: bool(s.engine_generation), 20).engine_generation
        decoder.wait(lambda s: bool(s.engine_generation), 20)

        def claim(of: str) -> str:
            key = LeaseKey(engine_id="p", request_id="r")
            answer = decoder.call(LeaseClaim(key=key, reader="one", generation=of), 20).result(20)
            assert isinstance(answer, LeaseClaimed)
            assert answer.seconds > 0
            return answer.generation

        assert claim(generation) == ""
        wanted = GetPeer(local_engine="d", engine_id="p", generation=generation, keyed=True)
        assert isinstance(decoder.call(wanted, 20).result(20), PeerReady)
        assert claim(generation) == generation
        assert claim("another generation") == ""


def test_a_lease_that_runs_out_ends_and_one_whose_owner_dies_too() -> None:
    ended: list[Message] = []
    with daemons() as (kvd,), session(kvd, scheduler(facts("p"), (OpenLease("short", 0.3),)), ended.append):
        assert wait_for(lambda: list(ended)) == [LeaseEnded(request_id="short", end="expired")]
        assert kvd.status().counters["leases.expired"] == 1
    with daemons() as (kvd,), session(kvd, scheduler(facts("p"), (OpenLease("long", 60.0),))) as owner:
        owner.close()
        assert kvd.status().counters["leases.owner_gone"] == 1


def test_what_was_told_on_a_lost_connection_is_told_again_on_the_next() -> None:
    opened = (OpenLease("r", 60.0),)
    card = scheduler(facts("p"))
    release = LeaseRelease(key=LeaseKey(engine_id="p", request_id="r"), reader="one")
    with (
        daemons() as (kvd,),
        zmq.Context() as context,
        context.socket(zmq.DEALER) as lost,
        context.socket(zmq.DEALER) as later,
        context.socket(zmq.DEALER) as decoder,
    ):
        for one in (lost, later, decoder):
            one.linger, one.rcvtimeo = 0, 10_000
            one.connect(f"ipc://{kvd.directory}/kvd.sock")

        def ask(one: zmq.Socket[bytes], message: Message) -> Message:
            one.send(encode(message, 1))
            return decode(one.recv())[0]

        assert isinstance(ask(later, card), Registered)
        assert ask(later, LeaseOpened(engine_id="p", leases=opened)) == Ok()
        card = msgspec.structs.replace(card, leases=opened)
        assert isinstance(ask(lost, card), Registered)  # sent before, and taken after: it lay in a queue
        assert isinstance(ask(decoder, scheduler(facts("d"))), Registered)
        assert ask(decoder, release) == Ok()
        assert isinstance(ask(later, Heartbeat(incarnation=card.incarnation)), NotRegistered)
        assert {type(ask(later, card)), type(decode(later.recv())[0])} == {LeaseEnded, Registered}


def test_a_release_that_cannot_be_delivered_is_kept_until_it_can() -> None:
    with (
        daemons(2) as (near, far),
        session(near, scheduler(facts("d"))) as decoder,
        Lender(far) as prefiller,
    ):
        key = prefiller.open("r")
        far.signal(signal.SIGSTOP)
        refused = decoder.call(LeaseRelease(key=key, reader="one"), 20).exception(20)
        assert isinstance(refused, RefusedByDaemon)
        assert refused.code == "KVD-PEER-UNREACHABLE"
        kept = decoder.deliver("release", LeaseRelease(key=key, reader="one"))
        far.signal(signal.SIGCONT)
        assert kept.result(20) == Ok()
        assert set(prefiller.wait_ended()) == {("r", "released")}, (
            "told again for each card that lay in a queue"
        )


def test_configured_peers_are_known_before_the_first_request() -> None:
    pushed: list[Message] = []
    with (
        daemons(1) as (far,),
        session(far, worker(facts("p"))),
        session(far, scheduler(facts("p"))),
        daemons(1) as (near,),
    ):
        near.kill()
        near.environment["KVD_PEER_CONNECT"] = f"127.0.0.1:{far.port}"
        near.start()
        with session(near, worker(facts("d")), pushed.append), session(near, scheduler(facts("d"))):
            ready = wait_for(lambda: next((m for m in pushed if isinstance(m, PeerReady)), None), 15)
            assert ready.peer.engine.engine_id == "p"
