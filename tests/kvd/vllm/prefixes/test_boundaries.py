"""Where prefixes end that an engine holds: what kvd is told, change by change."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.vllm.memory.groups import GroupFacts
from kvd.vllm.prefixes import boundaries as module
from kvd.vllm.prefixes.boundaries import Boundaries, every
from kvd.wire.prefixes.hints import TAG_BYTES


def block(number: int, group: int = 0) -> bytes:
    """The hash of a block, with its group, as vLLM keeps it."""
    return number.to_bytes(32, "little") + group.to_bytes(4, "big")


def numbers(tags: bytes) -> set[int]:
    return {int.from_bytes(tags[at : at + TAG_BYTES], "little") for at in range(0, len(tags), TAG_BYTES)}


FULL, MLA = GroupFacts("full", 16), GroupFacts("mla", 16)


@pytest.mark.parametrize(
    ("groups", "least", "expected"),
    [
        ((FULL,), 256, 16),
        ((FULL,), 1, 1),
        ((GroupFacts("full", 128),), 256, 16),
        ((FULL, GroupFacts("full", 16, window=128)), 256, 8),
        ((FULL, GroupFacts("full", 16, window=8)), 256, 1),
        # A state may be the only one of a prompt, wherever a block of its group ends.
        ((FULL, GroupFacts("mamba", 528)), 256, 33),
        ((MLA, GroupFacts("full", 64)), 256, 16),
        ((FULL, GroupFacts("full", 512)), 256, 32),
    ],
)
def test_a_tag_is_told_for_each_so_many_tokens(
    groups: tuple[GroupFacts, ...], least: int, expected: int
) -> None:
    assert every(groups, 16, least) == expected


def test_a_boundary_is_what_all_groups_hold() -> None:
    held = Boundaries(2, 16, 1)
    held.add(block(1, 0), 16)
    assert numbers(held.change().added) == set()
    held.add(block(1, 1), 16)
    assert numbers(held.change().added) == {1}
    held.add(block(1, 1), 16)  # there may be two of one
    held.remove(block(1, 1))
    assert numbers(held.change().added) == {1}
    held.remove(block(1, 0))
    assert numbers(held.change().added) == set()
    held.remove(block(1, 1))
    assert len(held) == 0


def test_only_each_so_many_blocks_are_told_of() -> None:
    held = Boundaries(1, 16, 2)
    for number in range(1, 6):
        held.add(block(number), number * 16)
    assert numbers(held.change().added) == {2, 4}
    held.remove(block(3))
    held.remove(block(2))
    assert numbers(held.change().added) == {4}


def test_what_kvd_has_is_not_told_again() -> None:
    held = Boundaries(1, 16, 1)
    for number in (1, 2):
        held.add(block(number), 16)
    first = held.change()
    assert (first.since, numbers(first.added)) == (0, {1, 2})
    held.taken(first.version)
    assert not held.untold
    held.add(block(3), 16)
    held.remove(block(1))
    lost = held.change()
    assert (lost.since, numbers(lost.added), numbers(lost.dropped)) == (first.version, {3}, {1})
    held.add(block(1), 16)  # while nobody has answered yet
    second = held.change()
    assert (second.since, numbers(second.added), numbers(second.dropped)) == (first.version, {1, 3}, set())
    held.taken(lost.version)
    third = held.change()
    assert (third.since, numbers(third.added)) == (lost.version, {1})
    held.taken(0)
    assert numbers(held.change().added) == {1, 2, 3}


def test_more_than_can_be_told_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TAGS", 2)
    held = Boundaries(1, 16, 1)
    for number in (1, 2, 3):
        held.add(block(number), 16)
    assert numbers(held.change().added) == {1, 2}
    held.taken(1)
    for number in (1, 2, 3):
        held.remove(block(number))
    for number in (4, 5):
        held.add(block(number), 16)
    whole = held.change()
    assert (whole.since, numbers(whole.added)) == (0, {4, 5})


def test_what_is_answered_after_too_much_has_changed_is_no_version_to_go_on_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_TAGS", 2)
    held = Boundaries(1, 16, 1)
    held.add(block(1), 16)
    held.taken(held.change().version)
    held.add(block(2), 16)
    asked = held.change()
    for number in (1, 2):
        held.remove(block(number))
    held.add(block(3), 16)
    held.taken(asked.version)
    whole = held.change()
    assert (whole.since, numbers(whole.added)) == (0, {3})


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 1)), max_size=60), st.data())
def test_all_changes_together_are_what_is_held(
    acts: list[tuple[bool, int, int]], data: st.DataObject
) -> None:
    held = Boundaries(2, 16, 1)
    counts: dict[tuple[int, int], int] = {}
    theirs: set[int] = set()
    for adds, number, group in acts:
        key = number, group
        if adds:
            held.add(block(number, group), 16)
            counts[key] = counts.get(key, 0) + 1
        elif counts.get(key):
            held.remove(block(number, group))
            counts[key] -= 1
        if data.draw(st.booleans()):
            change = held.change()
            theirs = set() if not change.since else theirs
            theirs = (theirs - numbers(change.dropped)) | numbers(change.added)
            held.taken(change.version)
            assert theirs == {n for n in range(6) if counts.get((n, 0)) and counts.get((n, 1))}
