"""Several readers of one lease: who may end it, what restarts and deaths do to the count. Real kvds, real sockets."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvd.client.session import KvdSession
from kvd.wire.identity import LeaseKey
from kvd.wire.lease import LeaseClaim, LeaseClaimed, LeaseRelease
from kvd.wire.reply import Ok
from tests.support.daemons import ROOT, Daemon, daemons, facts, measured, scheduler, session, wait_for
from tests.support.lender import Lender


def claim(one: KvdSession, key: LeaseKey, reader: str, extend: float = 0.0) -> LeaseClaimed:
    answer = one.call(LeaseClaim(key=key, reader=reader, extend_seconds=extend), 10).result(10)
    assert isinstance(answer, LeaseClaimed)
    return answer


def release(one: KvdSession, key: LeaseKey, reader: str) -> None:
    assert one.deliver(f"release {reader}", LeaseRelease(key=key, reader=reader)).result(20) == Ok()


# --- the count ---


def test_the_first_release_ends_nothing_and_the_last_one_the_lease() -> None:
    """As with `n: 2`, and with prompts whose answers come from one prefill."""
    with daemons(2) as (near, far), Lender(far) as prefiller, session(near, scheduler(facts("d"))) as decoder:
        key = prefiller.open("r")
        assert claim(decoder, key, "one").seconds > 0
        assert claim(decoder, key, "two").seconds > 0
        assert far.status().gauges["leases.readers"] == 2
        release(decoder, key, "one")
        assert prefiller.still_holds()
        assert claim(decoder, key, "two", extend=70.0).seconds > 60, "the reader that is left may renew"
        release(decoder, key, "two")
        assert prefiller.wait_ended() == [("r", "released")]
        counters = far.status().counters
        assert [counters[f"leases.{what}"] for what in ("claims", "renewals", "releases", "released")] == [
            2,
            1,
            2,
            1,
        ]


def test_a_retry_on_a_second_decoder_reads_on_when_the_first_is_done() -> None:
    with (
        daemons(3) as (near, other, far),
        Lender(far) as prefiller,
        session(near, scheduler(facts("d"))) as first,
        session(other, scheduler(facts("e"))) as second,
    ):
        key = prefiller.open("r")
        claim(first, key, "one")
        claim(second, key, "two")
        release(first, key, "one")
        assert prefiller.still_holds()
        release(second, key, "two")
        assert prefiller.wait_ended() == [("r", "released")]


def test_a_release_counts_once_and_its_reader_does_not_come_back() -> None:
    with daemons() as (kvd,), Lender(kvd) as prefiller, session(kvd, scheduler(facts("d"))) as decoder:
        key = prefiller.open("r")
        for reader in ("one", "two"):
            claim(decoder, key, reader)
        release(decoder, key, "one")
        release(decoder, key, "one")
        late = claim(decoder, key, "one", extend=30.0)
        assert (late.seconds, late.ended, "has released" in late.reason) == (0.0, True, True)
        assert prefiller.still_holds()
        release(decoder, key, "two")
        assert prefiller.wait_ended() == [("r", "released")]
        release(decoder, key, "two")
        assert kvd.status().counters["leases.releases_repeated"] == 2


def test_a_release_whose_claim_was_lost_ends_what_nobody_else_reads() -> None:
    with daemons() as (kvd,), Lender(kvd) as prefiller, session(kvd, scheduler(facts("d"))) as decoder:
        key = prefiller.open("r")
        release(decoder, key, "one")
        assert prefiller.wait_ended() == [("r", "released")]


def test_a_release_whose_claim_was_lost_ends_nothing_that_others_read() -> None:
    with daemons() as (kvd,), Lender(kvd) as prefiller, session(kvd, scheduler(facts("d"))) as decoder:
        key = prefiller.open("r")
        claim(decoder, key, "two")
        release(decoder, key, "one")
        assert prefiller.still_holds()


def test_a_reader_whose_time_is_over_holds_nothing_for_the_others() -> None:
    """It died, or lost its kvd: what it was promised has run out, though another reader had the lease extended."""
    with daemons() as (kvd,), Lender(kvd) as prefiller, session(kvd, scheduler(facts("d"))) as decoder:
        key = prefiller.open("r", seconds=1.0)
        promised = claim(decoder, key, "lost").seconds
        assert claim(decoder, key, "two", extend=30.0).seconds > 20
        time.sleep(promised + 0.2)
        release(decoder, key, "two")
        assert prefiller.wait_ended() == [("r", "released")]


def test_a_lease_has_no_more_time_than_the_readers_that_are_left() -> None:
    with daemons() as (kvd,), Lender(kvd) as prefiller, session(kvd, scheduler(facts("d"))) as decoder:
        key = prefiller.open("r", seconds=1.5)
        claim(decoder, key, "lost")
        claim(decoder, key, "two", extend=60.0)
        release(decoder, key, "two")
        assert prefiller.wait_ended(5.0) == [("r", "expired")]


# --- a kvd that is killed ---


def test_readers_that_a_killed_kvd_let_in_are_not_lost_to_the_next_one() -> None:
    """The next one cannot know how many there were: the lease ends by its time, and not before."""
    with daemons(2) as (near, far), Lender(far) as prefiller, session(near, scheduler(facts("d"))) as decoder:
        key = prefiller.open("r", seconds=9.0)
        opened = time.monotonic()
        for reader in ("one", "two"):
            assert claim(decoder, key, reader).seconds > 0
        far.kill()
        far.start()
        wait_for(lambda: far.engines().get("p") and prefiller.holds() == 1)
        release(decoder, key, "one")
        assert prefiller.still_holds()
        assert time.monotonic() - opened < 8, "the machine stood still: nothing was shown"
        assert prefiller.wait_ended() == [("r", "expired")]


def test_after_that_time_the_readers_that_the_next_kvd_knows_decide() -> None:
    """Then, and not after all the time that one of them asked for."""
    with daemons() as (kvd,), Lender(kvd) as prefiller, session(kvd, scheduler(facts("d"))) as decoder:
        key = prefiller.open("r", seconds=7.0)
        claim(decoder, key, "one")
        kvd.kill()
        kvd.start()
        decoder.wait(lambda s: s.connected and s.registrations > 1, 20)
        wait_for(lambda: kvd.engines().get("p") and prefiller.holds() == 1)
        assert claim(decoder, key, "one", extend=60.0).seconds > 50
        release(decoder, key, "one")
        assert prefiller.still_holds(), "others may read"
        assert prefiller.wait_ended(10.0) == [("r", "expired")]


def test_the_count_is_the_same_when_the_decoders_kvd_was_killed() -> None:
    with daemons(2) as (near, far), Lender(far) as prefiller, session(near, scheduler(facts("d"))) as decoder:
        key = prefiller.open("r")
        for reader in ("one", "two"):
            claim(decoder, key, reader)
        near.kill()
        kept = decoder.deliver("release one", LeaseRelease(key=key, reader="one"))
        near.start()
        assert kept.result(20) == Ok()
        assert prefiller.still_holds()
        release(decoder, key, "two")
        assert prefiller.wait_ended() == [("r", "released")]


# --- a decoder that dies ---

DECODER = """
import os, sys, threading, time, uuid
sys.path[:0] = sys.argv[1].split(":")
from kvd.client.session import KvdSession
from kvd.wire.identity import Endpoint, LeaseKey
from kvd.wire.lease import LeaseClaim
from kvd.wire.registration import OpenReader, RegisterScheduler
from tests.support.daemons import facts
directory, port, *readers = sys.argv[2:]
key = LeaseKey(engine_id="p", request_id="r", endpoint=Endpoint("127.0.0.1", int(port)))
mine = uuid.uuid4().hex
def card():
    held = tuple(OpenReader(key, reader, 60.0) for reader in readers)
    return RegisterScheduler(engine=facts("doomed"), incarnation=mine, pid=os.getpid(), readers=held)
session = KvdSession(card, directory=directory)
session.wait(lambda state: state.connected, 20)
for reader in readers:
    assert session.call(LeaseClaim(key=key, reader=reader), 10).result(10).seconds > 0
print("claimed", flush=True)
threading.Event().wait()
"""


@contextmanager
def decoding(near: Daemon, far: Daemon, *readers: str) -> Iterator[subprocess.Popen[str]]:
    """A decoder's scheduler in a process of its own, which has claimed lease ``r``."""
    path = f"{ROOT / 'daemon'}:{ROOT}"
    arguments = [sys.executable, "-c", DECODER, path, str(near.directory), str(far.port), *readers]
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "claimed\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def test_a_killed_decoder_is_released_by_its_kvd() -> None:
    with daemons(2) as (near, far), Lender(far) as prefiller:
        prefiller.open("r")
        with decoding(near, far, "one", "two") as child:
            assert near.status().gauges["readers.remembered"] == 2
            began = time.monotonic()
            child.kill()
            assert prefiller.wait_ended() == [("r", "aborted")]
            measured("a killed decoder's lease is freed", time.monotonic() - began)
        wait_for(lambda: near.status().counters["readers.released_for_dead"] == 2)
        wait_for(lambda: near.status().gauges["readers.remembered"] == 0)


def test_what_others_read_outlives_a_killed_decoder() -> None:
    with daemons(2) as (near, far), Lender(far) as prefiller, session(near, scheduler(facts("d"))) as decoder:
        key = prefiller.open("r")
        claim(decoder, key, "another")
        with decoding(near, far, "one") as child:
            child.kill()
            wait_for(lambda: near.status().counters.get("readers.released_for_dead"))
        assert prefiller.still_holds()
        release(decoder, key, "another")
        assert prefiller.wait_ended() == [("r", "released")]


def test_a_decoder_that_dies_after_its_kvd_was_killed_is_released_too() -> None:
    """Its session told the next kvd what it reads."""
    with daemons(2) as (near, far), Lender(far) as prefiller:
        prefiller.open("r")
        with decoding(near, far, "one") as child:
            near.kill()
            near.start()
            wait_for(lambda: near.status().gauges["readers.remembered"] == 1)
            child.kill()
            assert prefiller.wait_ended() == [("r", "aborted")]


def test_a_release_for_the_dead_waits_for_the_prefillers_kvd() -> None:
    with daemons(2) as (near, far), Lender(far) as prefiller:
        prefiller.open("r")
        with decoding(near, far, "one") as child:
            far.signal(signal.SIGSTOP)
            wait_for(lambda: near.status().peers[0].state == "down", 20)
            child.kill()
            wait_for(lambda: [w.state for w in near.workers()] == ["gone"])
            far.signal(signal.SIGCONT)
            assert set(prefiller.wait_ended(20)) == {("r", "aborted")}, (
                "told again for each card that lay in a queue"
            )
