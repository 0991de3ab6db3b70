"""Questions for prefixes: whom they reach, whose answer counts, and who is told nothing."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from kvd.client.errors import RefusedByDaemon
from kvd.wire.identity import HERE
from kvd.wire.prefix import CheckPrefix, PrefixFound, PrefixKept
from tests.support.daemons import Daemon, daemons, facts, session, worker
from tests.support.prefix_holders import LONG, found, holding, introduce, question, reading, sharing


@pytest.fixture
def kvds() -> Iterator[list[Daemon]]:
    with daemons(2) as two:
        yield two


def test_the_longest_prefix_is_found_on_this_host_or_another(kvds: list[Daemon]) -> None:
    here, there = kvds
    with (
        reading(here) as asker,
        holding(here, sharing("near"), 16) as near,
        holding(there, sharing("far"), 32) as far,
    ):
        introduce(here, "near")
        introduce(here, "far", there.endpoint)
        expected = PrefixFound(
            tokens=32, engine_id="far", generation=far.generation, endpoint=there.endpoint,
            blocks=((32,),), first_blocks=(0,),
        )  # fmt: skip
        assert found(asker, question()) == expected
        assert near.heard == far.heard == [question()]
        far.tokens = 16
        nearest = found(asker, question())
        assert (nearest.engine_id, nearest.endpoint, nearest.generation) == ("near", HERE, near.generation)


def test_an_engine_that_was_not_introduced_or_hashes_otherwise_is_not_asked(kvds: list[Daemon]) -> None:
    here, there = kvds
    with (
        reading(here) as asker,
        holding(there, sharing("stranger"), 32) as stranger,
        holding(there, sharing("other", "sha256/1"), 32) as other,
        holding(there, facts("off"), 32) as off,
    ):
        for name in ("other", "off"):
            introduce(here, name, there.endpoint)
        assert found(asker, question()) == PrefixFound()
        assert stranger.heard == other.heard == off.heard == []


def test_a_holder_that_says_nothing_costs_no_answer(kvds: list[Daemon]) -> None:
    """Nor one that has gone."""
    here, there = kvds
    with reading(here) as asker, holding(here, sharing("near"), 16):
        introduce(here, "near")
        with holding(there, sharing("far"), 32):
            introduce(here, "far", there.endpoint)
            assert found(asker, question()).engine_id == "far"
            there.kill()
            assert found(asker, question()).engine_id == "near"


def test_where_reads_cost_the_holder_too_much_the_next_one_is_read(kvds: list[Daemon]) -> None:
    here, there = kvds
    with (
        reading(here) as asker,
        holding(here, sharing("near"), 16),
        holding(there, sharing("far"), 32) as far,
    ):
        introduce(here, "near")
        introduce(here, "far", there.endpoint)
        far.busy = True
        assert found(asker, question()).engine_id == "near"
        assert there.status().counters["prefixes.busy"] == 1
        assert "prefixes.busy" not in {name for name, count in here.status().counters.items() if count}


def test_only_the_scheduler_of_an_engine_asks_for_it(kvds: list[Daemon]) -> None:
    here, _ = kvds
    with reading(here) as asker, reading(here, "e"):
        error = asker.call(question(engine="e"), LONG).exception(LONG)
        assert isinstance(error, RefusedByDaemon)
        assert error.refusal.code == "KVD-NOT-OWNER"
    assert here.ask_refused(question()).code == "KVD-NOT-REGISTERED"


def test_a_worker_hears_whether_the_holder_kept_it(kvds: list[Daemon]) -> None:
    here, there = kvds
    with session(here, worker(sharing("d"))) as reader, holding(there, sharing("far"), 32) as far:
        asked = CheckPrefix(engine_id="far", generation=far.generation, reader="r", endpoint=there.endpoint)
        assert reader.call(asked, LONG).result(LONG) == PrefixKept(kept=True)
        assert far.heard == [asked]
        far.kept = False
        assert reader.call(asked, LONG).result(LONG) == PrefixKept(kept=False)
        before = reader.call(msgspec.structs.replace(asked, generation="before"), LONG).result(LONG)
        assert isinstance(before, PrefixKept)
        assert not before.kept
    assert here.ask_refused(asked).code == "KVD-NOT-REGISTERED"
