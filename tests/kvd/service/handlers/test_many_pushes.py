"""Pushes over real kvds that die, and many of them at once."""

from __future__ import annotations

import sys
import time
from concurrent.futures import Future, wait

import pytest

from kvd.client.errors import TimedOut
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.push import (
    PushProgress,
)
from kvd.wire.reply import Ok, Refused
from tests.support.daemons import (
    facts,
    measured,
    session,
    wait_for,
    worker,
)
from tests.support.rigs.pushes import (
    LONG,
    Worker,
    pair,
    progress,
    refused,
)

# --- a kvd that dies ---


@pytest.mark.parametrize("which", ["near", "far"])
def test_nothing_is_lost_when_a_kvd_is_killed_in_between(which: str) -> None:
    with pair("liveness: {settle_seconds: 600}") as both:
        killed = both.near if which == "near" else both.far
        decoder, prefiller = both.decoders[0], both.prefillers[0]
        assert decoder.session.deliver("first", both.announce("first")).result(LONG) == Ok()
        announced = prefiller.told[0]

        def deliver(names: list[str]) -> list[Future[Message]]:
            there = [decoder.session.deliver(name, both.announce(name)) for name in names]
            said = {name: progress(announced, failed=name) for name in names}
            return there + [prefiller.session.deliver(f"p{name}", m) for name, m in said.items()]

        names = [f"{n}" for n in range(150)]
        futures = deliver(names[:50])
        killed.kill()
        futures += deliver(names[50:100])
        killed.start()
        futures += deliver(names[100:])
        assert not wait(futures, LONG).not_done
        assert {f.exception() or type(f.result()) for f in futures} == {Ok}
        assert both.prefillers[0].transfers == both.prefillers[1].transfers == {"first", *names}
        assert {m.failed for m in decoder.told if isinstance(m, PushProgress)} == set(names)


def test_an_engine_whose_workers_are_not_all_back_is_waited_for() -> None:
    with pair("liveness: {settle_seconds: 600}") as both:
        generations, announced = both.generations, both.announce()
        both.far.kill()
        both.prefillers[1].session.close()  # its goodbye reaches nobody
        both.far.start()
        wait_for(lambda: both.far.engines().get("p"))
        answer = wait_for(lambda: partial(both.decoders[0].session.call(announced, LONG)))
        assert not answer.final
        assert "1 of 2 workers" in answer.message
        kept = both.decoders[0].session.deliver("a", announced)
        with pytest.raises(TimeoutError):
            kept.result(0.5)
        late = Worker(both.prefillers[1].card)
        with session(both.far, late.card, late.heard) as again:
            assert kept.result(LONG) == Ok()
            assert again.state.engine_generation == generations[0]
            assert late.transfers == {"x"}


def partial(answer: Future[Message]) -> Refused | None:
    """The refusal of an engine that is not complete; None for another one, as of a link that is not up again yet."""
    refusal = refused(answer)
    return refusal if refusal.code == "KVD-ENGINE-PARTIAL" else None


# --- many at once ---


def test_1000_announcements_at_once_leave_room_for_handshakes() -> None:
    with pair() as both:
        one, other = (d.session for d in both.decoders)
        began = time.monotonic()
        futures = [one.deliver(f"{n}", both.announce(f"{n}", blocks=500)) for n in range(1000)]
        ask = GetPeer(local_engine="d", engine_id="p", endpoint=both.far.endpoint)
        assert isinstance(other.call(ask, LONG).result(LONG), PeerReady)
        measured("handshake among 1000 announcements", time.monotonic() - began)
        assert not wait(futures, LONG).not_done
        measured("1000 announcements to two workers each", time.monotonic() - began)
        assert {f.exception() or type(f.result()) for f in futures} == {Ok}
        assert both.prefillers[0].transfers == both.prefillers[1].transfers == {f"{n}" for n in range(1000)}
        repeats = sum(len(p.told) - 1000 for p in both.prefillers)
        sys.stderr.write(f"measured: told again {repeats}, refused {one.counters['deliveries.refused']}\n")
        wait_for(lambda: both.near.status().gauges["pushes.underway"] == 0)


def test_announcements_to_a_dead_kvd_leave_room_for_handshakes() -> None:
    with pair() as both, session(both.near, worker(facts("beside"))):
        both.far.kill()
        one, other = (d.session for d in both.decoders)
        for n in range(1500):
            one.deliver(f"{n}", both.announce(f"{n}", blocks=500), LONG)
        ask = GetPeer(local_engine="d", engine_id="beside")
        waits = []
        for _ in range(20):
            began = time.monotonic()
            assert isinstance(other.call(ask, LONG).result(LONG), PeerReady)
            waits.append(time.monotonic() - began)
        measured("slowest of 20 handshakes beside 1500 announcements to nobody", max(waits))
        assert wait_for(lambda: both.near.status().counters.get("refused.KVD-BUSY"), LONG)


def test_block_ids_that_wait_are_bounded_and_a_delivery_that_nobody_takes_ends_after_its_time() -> None:
    with pair() as both:
        both.far.kill()
        one = both.decoders[0].session
        for n in range(50):
            one.deliver(f"{n}", both.announce(f"{n}", blocks=100_000), 2 * LONG)
        wait_for(lambda: both.near.status().counters.get("refused.KVD-BUSY"), LONG)
        assert both.near.status().gauges["pushes.underway"] <= 41
        kept = one.deliver("short", both.announce("short"), 1.0)
        assert isinstance(kept.exception(LONG), TimedOut)
        assert one.counters["deliveries.dropped"] == 1
