"""What a host of the fleet may say, and what only another one may: real kvds, real keys, a key for each host.

Host ``near`` has the decoding engine, ``far`` the prefilling one. ``third`` is trusted as well, and lies.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest

from kvd.client.errors import RefusedByDaemon
from kvd.geometry.rank import Rank
from kvd.keys import TrustedKey, read_trusted, write_trusted
from kvd.wire.checksum import GetSums
from kvd.wire.frame import Message
from kvd.wire.handshake import DescribeEngine, EngineDescribed, GetPeer, PeerGone, PeerReady, Ping, Pong
from kvd.wire.identity import Endpoint, LeaseKey
from kvd.wire.lease import LeaseClaim, LeaseClaimed, LeaseRelease
from kvd.wire.push import PushDone, PushKey, PushWithdraw
from kvd.wire.reply import Ok
from tests.support.daemons import daemons, facts, scheduler, session, wait_for, worker
from tests.support.halting import halted
from tests.support.hosts import Host, Speaker, hosts, speaking
from tests.support.lender import Lender
from tests.support.rigs.pushes import LONG, Pair, announcement, pair_at, progress

Fleet = dict[str, Host]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Three hosts that trust each other."""
    with hosts("near", "far", "third") as made:
        yield made


@pytest.fixture
def both(fleet: Fleet) -> Iterator[Pair]:
    """The engines at their hosts."""
    with pair_at(fleet["near"].daemon, fleet["far"].daemon) as made:
        yield made


@pytest.fixture
def liar(fleet: Fleet) -> Iterator[Speaker]:
    """The third host, speaking to the prefiller's."""
    with speaking(fleet["third"].pair, fleet["far"]) as made:
        yield made


# --- leases ---


def test_a_host_does_not_release_what_another_reads(fleet: Fleet, liar: Speaker) -> None:
    near, far = fleet["near"].daemon, fleet["far"].daemon
    with Lender(far) as prefiller, session(near, scheduler(facts("d"))) as decoder:
        key = prefiller.open("r")
        claim = LeaseClaim(key=key, reader="one")
        claimed = decoder.call(claim, 10).result(10)
        assert isinstance(claimed, LeaseClaimed)
        assert claimed.seconds > 0
        for reader in ("one", "never claimed"):
            assert liar.ask(LeaseRelease(key=key, reader=reader)) == Ok()
        assert prefiller.still_holds()
        renewed = decoder.call(claim, 10).result(10)
        assert isinstance(renewed, LeaseClaimed)
        assert renewed.seconds > 0, "what the other host released is not this reader"
        assert decoder.deliver("done", LeaseRelease(key=key, reader="one")).result(10) == Ok()
        assert prefiller.wait_ended() == [("r", "released")]


def test_a_release_by_a_host_that_was_never_given_the_engine_ends_no_lease(
    fleet: Fleet, liar: Speaker
) -> None:
    with Lender(fleet["far"].daemon) as prefiller:
        key = prefiller.open("r")
        assert liar.ask(LeaseRelease(key=key, reader="one")) == Ok()
        assert prefiller.still_holds()


def test_a_host_does_not_claim_an_hour(fleet: Fleet, liar: Speaker) -> None:
    with Lender(fleet["far"].daemon) as prefiller:
        key = prefiller.open("r", seconds=30.0)
        claimed = liar.ask(LeaseClaim(key=key, reader="one", extend_seconds=3600.0))
        assert isinstance(claimed, LeaseClaimed)
        assert 30 < claimed.seconds < 121


def test_who_is_no_engine_claims_and_releases_nothing(fleet: Fleet) -> None:
    near = fleet["near"].daemon
    key = LeaseKey(engine_id="p", request_id="r", endpoint=fleet["far"].daemon.endpoint)
    for message in (LeaseClaim(key=key, reader="one"), LeaseRelease(key=key, reader="one")):
        assert near.ask_refused(message).code == "KVD-NOT-REGISTERED"


# --- pushes ---


def test_pushes_between_hosts_that_say_who_they_are(both: Pair) -> None:
    decoder = both.decoders[0]
    assert decoder.session.deliver("a", both.announce()).result(LONG) == Ok()
    for source, prefiller in enumerate(both.prefillers):
        said = progress(prefiller.told[0], source)
        assert prefiller.session.deliver("p", said).result(LONG) == Ok()
        assert decoder.told[-1] == said
    withdraw = PushWithdraw(key=both.key(), generation=both.generations[0])
    assert decoder.session.deliver("w", withdraw).result(LONG) == Ok()
    assert decoder.session.deliver("e", PushDone(key=both.key())).result(LONG) == Ok()


def test_nobody_announces_withdraws_or_ends_a_push_in_the_name_of_another_hosts_decoder(
    both: Pair, liar: Speaker, fleet: Fleet
) -> None:
    key = _with_endpoint(both.key(), both.near.endpoint)
    announced = msgspec.structs.replace(both.announce(), key=key, window=b"the liar's memory")
    for message in (announced, PushWithdraw(key=key), PushDone(key=key)):
        refusal = liar.refused(message)
        assert (refusal.code, refusal.final) == ("KVD-NOT-YOUR-ENGINE", True)
        assert str(both.near.endpoint) in refusal.message
    assert not [told for one in both.prefillers for told in one.told]
    assert fleet["far"].counter("peers.impostors") >= 3


def test_nobody_announces_for_an_engine_that_its_own_host_does_not_have(
    both: Pair, liar: Speaker, fleet: Fleet
) -> None:
    key = _with_endpoint(both.key(), fleet["third"].daemon.endpoint)
    refusal = liar.refused(msgspec.structs.replace(both.announce(), key=key))
    assert "KVD-ENGINE" in refusal.code
    assert not [told for one in both.prefillers for told in one.told]


def test_nobody_announces_another_generation_than_the_decoder_has(both: Pair, fleet: Fleet) -> None:
    key = _with_endpoint(both.key(), both.near.endpoint)
    with speaking(fleet["near"].pair, fleet["far"]) as near:
        announced = msgspec.structs.replace(
            both.announce(), key=key, generations=(both.generations[0], "another")
        )
        assert near.refused(announced).code == "KVD-PEER-GENERATION"
    assert not [told for one in both.prefillers for told in one.told]


def test_nobody_says_that_another_hosts_prefiller_has_written(both: Pair, fleet: Fleet) -> None:
    assert both.decoders[0].session.deliver("a", both.announce()).result(LONG) == Ok()
    forged = progress(both.prefillers[0].told[0])
    with speaking(fleet["third"].pair, fleet["near"]) as liar:
        refusal = liar.refused(forged)
        assert (refusal.code, refusal.final) == ("KVD-NOT-YOUR-ENGINE", True)
        assert liar.refused(msgspec.structs.replace(forged, failed="no", quiesced=True)).final
    assert not both.decoders[0].told


def test_who_is_asked_whether_an_engine_is_its_own_holds_no_place_of_pushes(
    fleet: Fleet, both: Pair, liar: Speaker
) -> None:
    third, far = fleet["third"].daemon, fleet["far"]
    key = _with_endpoint(both.key(), third.endpoint)
    announced = announcement(key, both.generations)
    before = far.counter("handshakes.flights")
    with halted((third.pid,)):
        assert not liar.answered(announced, 0.0)
        wait_for(lambda: far.counter("handshakes.flights") > before)
        assert far.daemon.status().gauges["pushes.underway"] == 0


# --- checksums ---


def test_checksums_are_for_hosts_that_use_the_engine(both: Pair, liar: Speaker) -> None:
    question = GetSums(
        engine_id="p", generation=both.generations[0], endpoint=both.far.endpoint, rank=Rank(0), request_id="r",
        wanted=(),
    )  # fmt: skip
    refusal = liar.refused(question)
    assert (refusal.code, refusal.final) == ("KVD-NOT-DESCRIBED", False)
    asked = DescribeEngine(engine_id="p", kvd_id="third", kvd_generation="g")
    assert isinstance(liar.ask(asked), EngineDescribed)
    # The rig's workers take no such question: it got as far as them.
    assert liar.refused(question).code == "KVD-NOT-TAKEN"


# --- who is trusted, while kvd runs ---


def test_a_revoked_host_is_out_within_a_second_and_in_again_when_it_is_trusted() -> None:
    gone: list[Message] = []
    with hosts("near", "far") as fleet:
        near, far = fleet["near"], fleet["far"]
        ask = GetPeer(local_engine="d", engine_id="p", endpoint=far.daemon.endpoint)
        with (
            session(far.daemon, worker(facts("p"))),
            session(near.daemon, worker(facts("d")), gone.append) as one,
            speaking(far.pair, near) as spoken,
        ):
            assert isinstance(one.call(ask, 10).result(10), PeerReady)
            assert isinstance(spoken.ask(Ping(kvd_id="far", kvd_generation="g")), Pong)
            began = time.monotonic()
            near.trust()
            wait_for(lambda: near.counter("connections.peer.ended"), 5)
            wait_for(lambda: not near.daemon.status().peers, 5)
            assert wait_for(lambda: [m for m in gone if isinstance(m, PeerGone)])
            assert time.monotonic() - began < 1.0
            assert not spoken.answered(Ping(kvd_id="far", kvd_generation="g"), 0.2)
            error = one.call(ask, 10).exception(10)
            assert isinstance(error, RefusedByDaemon)
            assert error.code == "KVD-PEER-UNREACHABLE"
            assert "was revoked here" in error.message
            near.trust(far)
            wait_for(lambda: _ready(one.call(ask, 10).exception(10)), 10)


def test_a_host_that_is_trusted_while_kvd_runs_comes_in() -> None:
    with hosts("near", "far") as fleet:
        near, far = fleet["near"], fleet["far"]
        far.trust_and_wait()
        with session(far.daemon, worker(facts("p"))), session(near.daemon, worker(facts("d"))) as one:
            ask = GetPeer(local_engine="d", engine_id="p", endpoint=far.daemon.endpoint)
            assert isinstance(one.call(ask, 10).exception(10), RefusedByDaemon)
            far.trust_and_wait(near)
            wait_for(lambda: _ready(one.call(ask, 10).exception(10)), 10)


def test_a_list_that_cannot_be_read_changes_nothing_and_says_so() -> None:
    with hosts("near", "far") as fleet:
        near, far = fleet["near"], fleet["far"]
        written = near.folder / "written elsewhere"
        written.write_text("this is no key\n")
        written.replace(near.trusted)  # what is written in its place is empty first, which is another test's
        wait_for(lambda: near.counter("keys.unreadable"))
        wait_for(lambda: "line 1" in near.daemon.log)
        with speaking(far.pair, near) as spoken:
            assert isinstance(spoken.ask(Ping(kvd_id="far", kvd_generation="g")), Pong)
        near.trusted.unlink()
        near.trust()
        with speaking(far.pair, near) as spoken:
            wait_for(lambda: not spoken.answered(Ping(kvd_id="far", kvd_generation="g"), 0.2), 5)


def test_a_list_that_is_being_written_in_its_place_revokes_nobody() -> None:
    """Editors, `cp` and `tee` empty it first; what is left out for good is gone within the second all the same."""
    with hosts("near", "far") as fleet:
        near, far = fleet["near"], fleet["far"]
        text = near.trusted.read_text()
        with speaking(far.pair, near) as spoken:
            for _ in range(4):
                near.trusted.write_text("")
                time.sleep(0.3)
                near.trusted.write_text(text)
                time.sleep(0.3)
            assert isinstance(spoken.ask(Ping(kvd_id="far", kvd_generation="g")), Pong)
            assert not near.counter("keys.changes")
            near.trusted.write_text("# nobody\n")
            began = time.monotonic()
            wait_for(lambda: near.counter("keys.changes"), 5)
            assert time.monotonic() - began < 1.5


def test_a_host_with_another_key_than_the_one_that_is_trusted_is_not_linked() -> None:
    with hosts("near", "far", "third", KVD_PEER_HANDSHAKE_SECONDS="1") as fleet:
        near, far, third = (fleet[name] for name in ("near", "far", "third"))
        write_trusted(near.trusted, [TrustedKey(third.pair.public, "127.0.0.1", far.daemon.port)])
        wait_for(lambda: near.counter("keys.changes"))
        with session(far.daemon, worker(facts("p"))), session(near.daemon, worker(facts("d"))) as one:
            error = one.call(
                GetPeer(local_engine="d", engine_id="p", endpoint=far.daemon.endpoint), 20
            ).exception(20)
            assert isinstance(error, RefusedByDaemon)
            assert error.code == "KVD-PEER-UNREACHABLE"


def test_a_host_with_a_new_pair_is_back_when_the_others_have_replaced_its_key() -> None:
    with hosts("near", "far", KVD_PEER_PING_SECONDS="0.2", KVD_PEER_DOWN_SECONDS="1") as fleet:
        near, far = fleet["near"], fleet["far"]
        ask = GetPeer(local_engine="d", engine_id="p", endpoint=far.daemon.endpoint)
        with session(far.daemon, worker(facts("p"))), session(near.daemon, worker(facts("d"))) as one:
            assert isinstance(one.call(ask, 10).result(10), PeerReady)
            far.daemon.kill()
            before = far.line
            far.new_pair()
            far.daemon.start()
            wait_for(lambda: near.daemon.status().peers[0].state == "down", 15)
            near.trust_and_wait(far)
            assert before not in read_trusted(near.trusted)
            wait_for(lambda: [peer.state for peer in near.daemon.status().peers] == ["up"], 10)
            assert isinstance(one.call(ask, 10).result(10), PeerReady)


def test_a_fleet_with_one_pair_says_what_it_gives_up() -> None:
    with hosts("near") as fleet, daemons() as (plain,):
        near = fleet["near"]
        assert "cannot tell them apart" not in near.daemon.log
        near.daemon.kill()
        del near.daemon.environment["KVD_PEER_CURVE_AUTHORIZED_KEYS"]
        near.daemon.start()
        assert "cannot tell them apart" in near.daemon.log
        assert "peers have no keys" in plain.log


def _with_endpoint(key: PushKey, endpoint: Endpoint) -> PushKey:
    return msgspec.structs.replace(key, decoder_endpoint=endpoint)


def _ready(error: BaseException | None) -> bool:
    return error is None
