"""What kvd knows of what engines hold: told in changes, told on in changes, bounded, and ended with who told it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.service.prefixes import hints as module
from kvd.service.prefixes.hints import Hints
from kvd.service.prefixes.tags import PromptTags
from kvd.wire.identity import HERE, Endpoint
from kvd.wire.prefixes.hints import MOST_TAGS, HintChange

KEY = (HERE, "a")
THERE = Endpoint("there", 1)


def tags(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


def change(version: int, since: int = 0, added: bytes = b"", dropped: bytes = b"") -> HintChange:
    return HintChange(version=version, since=since, hash_tokens=16, every=1, added=added, dropped=dropped)


def prompt(*numbers: int) -> bytes:
    return b"".join(tags(number) + bytes(24) for number in numbers)


@pytest.fixture
def counters() -> Counter[str]:
    return Counter()


@pytest.fixture
def hints(counters: Counter[str]) -> Hints:
    return Hints(counters)


def held(hints: Hints, *numbers: int, of: str = "g", key: tuple[Endpoint, str] = KEY) -> int:
    hint = hints.get(key, of)
    assert hint is not None
    return hint.held(PromptTags(prompt(*numbers), 16))


def test_changes_follow_each_other(hints: Hints) -> None:
    assert hints.take(KEY, "g", change(1, added=tags(1, 2, 3))) == 1
    assert hints.take(KEY, "g", change(2, 1, tags(4), tags(3))) == 2
    assert held(hints, 1, 2, 3) == 32
    assert held(hints, 1, 2, 4) == 48
    assert held(hints, 9) == 0


def test_hashes_of_other_blocks_are_of_no_use(hints: Hints) -> None:
    hints.take(KEY, "g", change(1, added=tags(1)))
    hint = hints.get(KEY, "g")
    assert hint is not None
    assert hint.held(PromptTags(prompt(1), 32)) == 0


def test_a_change_of_what_is_not_known_is_not_taken(hints: Hints) -> None:
    assert hints.take(KEY, "g", change(5, 4, tags(1))) == 0
    assert hints.get(KEY, "g") is None
    hints.take(KEY, "g", change(1, added=tags(1)))
    assert hints.take(KEY, "g", change(5, 4, tags(2))) == 1
    assert held(hints, 1, 2) == 16


def test_what_was_told_ends_with_the_generation(hints: Hints) -> None:
    hints.take(KEY, "g", change(1, added=tags(1)))
    assert hints.get(KEY, "h") is None
    assert hints.take(KEY, "h", change(2, 1, tags(2))) == 0
    assert hints.get(KEY, "g") is None
    assert hints.kept == 0


def test_what_another_kvd_told_is_dropped_with_its_link(hints: Hints) -> None:
    for name in ("a", "b"):
        hints.take((THERE, name), "g", change(1, added=tags(1)))
    hints.take(KEY, "g", change(1, added=tags(1)))
    hints.drop_all_at(THERE, but={"a": "g", "b": "h"})
    assert [key for key, _ in hints.rows()] == [(THERE, "a"), KEY]
    hints.drop_all_at(THERE)
    assert [key for key, _ in hints.rows()] == [KEY]


@pytest.mark.parametrize("wrong", [change(2, 1, b"1234567"), change(2, 1, dropped=b"1"), None])
def test_what_makes_no_sense_is_counted_and_ends_what_was_known(
    hints: Hints, counters: Counter[str], wrong: HintChange | None
) -> None:
    hints.take(KEY, "g", change(1, added=tags(*range(MOST_TAGS))))
    assert hints.take(KEY, "g", wrong or change(2, 1, tags(1 << 40))) == 0
    assert hints.get(KEY, "g") is None
    assert (counters["prefixes.hints_malformed"], hints.kept) == (1, 0)


def test_more_than_there_is_room_for_is_not_kept(
    hints: Hints, counters: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_KEPT", 3)
    hints.take(KEY, "g", change(1, added=tags(1, 2)))
    assert hints.take((THERE, "b"), "g", change(1, added=tags(1, 2))) == 1
    assert hints.get((THERE, "b"), "g") is None
    hints.take(KEY, "g", change(2, 1, tags(3), tags(1)))
    hints.take((THERE, "b"), "g", change(2, added=tags(1)))
    assert (hints.kept, counters["prefixes.hints_unkept"]) == (3, 1)


Step = tuple[list[int], list[int]]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(*[st.lists(st.integers(0, 12), max_size=6)] * 2), min_size=1, max_size=30),
    st.integers(0, 40),
)
def test_who_knows_any_version_has_the_newest_with_what_is_new(steps: list[Step], known: int) -> None:
    hints, other = Hints(Counter()), Hints(Counter())
    for version, (added, dropped) in enumerate(steps, 1):
        hints.take(KEY, "g", change(version, version - 1, tags(*added), tags(*dropped)))
        if version == known:
            whole = hints.since("a", "g", 0)
            assert whole is not None
            other.take((THERE, "a"), "g", whole)
    there = other.get((THERE, "a"), "g")
    new = hints.since("a", "g", there.version if there is not None else 0)
    if known == len(steps):
        assert new is None
        return
    assert new is not None
    assert other.take((THERE, "a"), "g", new) == len(steps)
    ours, theirs = hints.get(KEY, "g"), other.get((THERE, "a"), "g")
    assert ours is not None
    assert theirs is not None
    assert ours.tags.tolist() == theirs.tags.tolist()


def test_a_few_changes_are_told_on_as_such(hints: Hints) -> None:
    hints.take(KEY, "g", change(1, added=tags(*range(100))))
    hints.take(KEY, "g", change(2, 1, tags(200), tags(1)))
    hints.take(KEY, "g", change(3, 2, tags(1, 300), tags(200)))
    assert hints.since("a", "g", 1) == change(3, 1, tags(1, 300), tags(200))
    assert hints.since("a", "g", 3) is None
    assert hints.since("a", "other", 1) is None


def test_changes_of_more_than_all_tags_are_not_remembered(hints: Hints) -> None:
    """Of an engine that holds nothing any more there is nothing to remember."""
    hints.take(KEY, "g", change(1, added=tags(1)))
    for version in range(2, 5):
        hints.take(KEY, "g", change(version, version - 1, dropped=tags(*range(MOST_TAGS))))
        assert hints.remembered == 0
        assert hints.since("a", "g", version - 1) == change(version)


def test_all_changes_together_are_bounded(hints: Hints, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine for whose there is no room is told of whole."""
    monkeypatch.setattr(module, "MOST_REMEMBERED", 3)
    for name in ("a", "b"):
        hints.take((HERE, name), "g", change(1, added=tags(*range(10))))
        hints.take((HERE, name), "g", change(2, 1, tags(20), tags(1)))
    assert hints.remembered == 2
    assert hints.since("a", "g", 1) == change(2, 1, tags(20), tags(1))
    whole = hints.since("b", "g", 1)
    assert whole is not None
    assert whole.since == 0
    hints.drop((HERE, "a"))
    assert hints.remembered == 0


def test_no_user_and_no_other_kvd_has_the_room_of_all(
    hints: Hints, counters: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_KEPT_OF_ONE", 3)
    hints.take((HERE, "a"), "g", change(1, added=tags(1, 2)), 1000)
    hints.take((HERE, "b"), "g", change(1, added=tags(1, 2)), 1000)
    hints.take((HERE, "c"), "g", change(1, added=tags(1, 2)), 1001)
    hints.take((THERE, "a"), "g", change(1, added=tags(1, 2)))
    hints.take((THERE, "b"), "g", change(1, added=tags(1, 2)))
    assert [key for key, _ in hints.rows()] == [(HERE, "a"), (HERE, "c"), (THERE, "a")]
    assert counters["prefixes.hints_unkept"] == 2


def test_who_waits_is_woken_by_a_change_here_by_another_question_and_by_the_end(hints: Hints) -> None:
    async def waiting() -> None:
        for act in (
            lambda: hints.take(KEY, "g", change(1, added=tags(1))),
            lambda: hints.ask(b"route"),
            hints.close,
        ):
            asking = hints.ask(b"route")
            waits = asyncio.create_task(asking.woken(30.0))
            await asyncio.sleep(0)
            act()
            await waits
        assert asking.over
        await hints.ask(b"route").paused(30.0)

    began = time.monotonic()
    asyncio.run(waiting())
    assert time.monotonic() - began < 10.0
