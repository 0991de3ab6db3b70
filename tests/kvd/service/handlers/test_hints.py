"""Hints between kvds: who is asked because of them, who is not, and when they end."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from kvd.wire.prefix import FindPrefix, PrefixFound
from kvd.wire.prefixes.hints import GetHints, HintChange, HintsTold
from kvd.wire.query import GetStatus, KvdStatus
from tests.support.daemons import Daemon, daemons, wait_for
from tests.support.hosts import hosts, speaking
from tests.support.prefix_holders import Holder, found, holding, introduce, question, reading, sharing

HASHES = b"".join(bytes([number]) * 32 for number in (1, 2, 3, 4))


@pytest.fixture
def kvds() -> Iterator[list[Daemon]]:
    with daemons(2) as two:
        yield two


def prompt(beyond: int = 0) -> FindPrefix:
    return msgspec.structs.replace(question(), hashes=HASHES, most=64, beyond=beyond)


def holds(blocks: int, version: int = 1, since: int = 0, **changes: bytes) -> HintChange:
    added = b"".join(bytes([number]) * 8 for number in range(1, blocks + 1))
    made = HintChange(version=version, since=since, hash_tokens=16, every=1, added=added)
    return msgspec.structs.replace(made, **changes)


def counter(kvd: Daemon, name: str) -> int:
    status = kvd.ask(GetStatus())
    assert isinstance(status, KvdStatus)
    return status.counters.get(name, 0)


def known(kvd: Daemon, count: int) -> None:
    """Wait until a kvd knows so many tags."""

    def now() -> bool:
        status = kvd.ask(GetStatus())
        assert isinstance(status, KvdStatus)
        return status.gauges["prefixes.tags"] == count

    wait_for(now, 30.0)


def asked(holder: Holder) -> int:
    count = len(holder.heard)
    holder.heard.clear()
    return count


def test_only_who_holds_more_by_its_hints_is_asked(kvds: list[Daemon]) -> None:
    here, there = kvds
    with (
        reading(here) as asker,
        holding(here, sharing("near"), 16) as near,
        holding(there, sharing("far"), 48) as far,
        holding(there, sharing("empty"), 0) as empty,
    ):
        near.tell(holds(1), "near")
        far.tell(holds(3), "far")
        empty.tell(holds(0), "empty")
        introduce(here, "near")
        for name in ("far", "empty"):
            introduce(here, name, there.endpoint)
        # Of the other host nothing is known yet, so all of it is asked.
        assert found(asker, prompt()).engine_id == "far"
        known(here, 4)
        for one in (near, far, empty):
            asked(one)
        assert found(asker, prompt()).engine_id == "far"
        assert [asked(one) for one in (near, far, empty)] == [0, 1, 0]
        # Nobody holds more than what the asker has.
        assert found(asker, prompt(beyond=64)) == PrefixFound()
        assert [asked(one) for one in (near, far, empty)] == [0, 0, 0]
        assert counter(here, "prefixes.questions_wasted") == 0


def test_a_hint_that_is_out_of_date_costs_a_question_and_the_next_holder_is_asked(kvds: list[Daemon]) -> None:
    here, _ = kvds
    with (
        reading(here) as asker,
        holding(here, sharing("stale"), 0) as stale,
        holding(here, sharing("right"), 32) as right,
    ):
        stale.tell(holds(3), "stale")
        right.tell(holds(2), "right")
        for name in ("stale", "right"):
            introduce(here, name)
        assert found(asker, prompt()).engine_id == "right"
        assert (asked(stale), asked(right)) == (1, 1)
        assert counter(here, "prefixes.questions_wasted") == 1


def test_no_engine_is_asked_twice_where_another_one_of_its_host_tells_nothing(kvds: list[Daemon]) -> None:
    here, there = kvds
    with (
        reading(here) as asker,
        holding(there, sharing("far"), 48) as far,
        holding(there, sharing("old"), 16) as old,
    ):
        far.tell(holds(3), "far")
        for name in ("far", "old"):
            introduce(here, name, there.endpoint)
        found(asker, prompt())
        known(here, 3)
        for one in (far, old):
            asked(one)
        assert found(asker, prompt()).engine_id == "far"
        assert (asked(far), asked(old)) == (1, 1)


def test_changes_reach_another_kvd_by_themselves(kvds: list[Daemon]) -> None:
    here, there = kvds
    with reading(here) as asker, holding(there, sharing("far"), 32) as far:
        far.tell(holds(0), "far")
        introduce(here, "far", there.endpoint)
        found(asker, prompt())
        wait_for(lambda: counter(there, "prefixes.hints_given") == 1, 30.0)
        assert far.tell(holds(2, 2, 1), "far") == 2
        known(here, 2)
        asked(far)
        assert found(asker, prompt()).tokens == 32
        far.tell(holds(0, 3, 2, dropped=b"\1" * 8 + b"\2" * 8), "far")
        known(here, 0)
        asked(far)
        assert found(asker, prompt()) == PrefixFound()
        assert asked(far) == 0


def test_hints_end_with_the_link_and_with_the_engine(kvds: list[Daemon]) -> None:
    here, there = kvds
    with reading(here) as asker, holding(here, sharing("near"), 16) as near:
        near.tell(holds(1), "near")
        introduce(here, "near")
        with holding(there, sharing("far"), 48) as far:
            far.tell(holds(3), "far")
            introduce(here, "far", there.endpoint)
            found(asker, prompt())
            known(here, 4)
            there.kill()
            known(here, 1)
    known(here, 0)


def test_an_engine_that_was_not_introduced_is_not_told_of(kvds: list[Daemon]) -> None:
    here, there = kvds
    with (
        reading(here) as asker,
        holding(there, sharing("far"), 16) as far,
        holding(there, sharing("stranger"), 48) as stranger,
    ):
        far.tell(holds(1), "far")
        stranger.tell(holds(3), "stranger")
        introduce(here, "far", there.endpoint)
        found(asker, prompt())
        known(here, 1)
        asked(stranger)
        assert found(asker, prompt()).engine_id == "far"
        assert asked(stranger) == 0


def test_a_host_with_a_trusted_key_that_was_given_no_card_is_told_nothing() -> None:
    with hosts("reader", "holder", "stranger") as three:
        here, there = three["reader"].daemon, three["holder"].daemon
        with reading(here), holding(there, sharing("far"), 32) as far:
            far.tell(holds(2), "far")
            introduce(here, "far", there.endpoint)
            with (
                speaking(three["reader"].pair, three["holder"]) as known_one,
                speaking(three["stranger"].pair, three["holder"]) as stranger,
            ):
                told = known_one.ask(GetHints())
                assert isinstance(told, HintsTold)
                assert [one.engine_id for one in told.engines] == ["far"]
                assert not stranger.answered(GetHints(), 2.0)


def test_what_makes_no_sense_is_counted_and_all_is_asked_for(kvds: list[Daemon]) -> None:
    here, _ = kvds
    with holding(here, sharing("near"), 16) as near:
        assert near.tell(holds(1), "near") == 1
        assert near.tell(holds(0, 2, 1, added=b"1234567"), "near") == 0
        assert counter(here, "prefixes.hints_malformed") == 1
        known(here, 0)
        assert near.tell(holds(1, 3, 2), "near") == 0
        assert near.tell(holds(2, 4), "near") == 4
        known(here, 2)
