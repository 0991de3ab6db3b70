"""Which steps may touch the blocks of a load, by what was taken back lately."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.vllm.scheduler.freed_blocks import KEPT, MARKED, FreedBlocks
from kvd.worker.orders import LoadOrder
from tests.support.rigs.bench import order, prefill


@dataclass(frozen=True)
class Block:
    block_id: int


class Pool:
    """As vLLM's, which is given any iterable, and gives ``next`` first."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.next = [7, 8, 3]

    def get_num_free_blocks(self) -> int:
        return len(self.next)

    @property
    def free_block_queue(self) -> Any:
        head = None
        for number in reversed([0, *self.next]):
            head = SimpleNamespace(block_id=number, next_free_block=head)
        return SimpleNamespace(fake_free_list_head=head)

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        self.free += [block.block_id for block in blocks]


@dataclass
class Output:
    """A step that changes blocks beforehand, or does not."""

    new_block_ids_to_zero: list[int] | None = None
    kv_cache_block_copies: list[Any] | None = None


PLAIN = Output()


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def freed(pool: Pool) -> FreedBlocks:
    watched = FreedBlocks()
    watched.watch(pool)
    return watched


def load(*blocks: int) -> LoadOrder:
    return order(prefill(((5, 6),)), blocks)


def after(freed: FreedBlocks, one: LoadOrder, output: Output = PLAIN) -> int | None:
    """The last step that may touch the blocks of a load which the next step orders."""
    given = replace(one, after=freed.last_use(one.block_ids))
    *_, (found,) = freed.scheduled([given], output)
    assert replace(found, after=None) == one
    return found.after


def steps(freed: FreedBlocks, count: int) -> None:
    for _ in range(count):
        freed.scheduled([], PLAIN)


def test_a_block_that_was_taken_back_may_be_touched_by_the_steps_that_were_scheduled_by_then(
    freed: FreedBlocks, pool: Pool
) -> None:
    steps(freed, 5)
    pool.free_blocks(iter([Block(2), Block(3)]))
    assert pool.free == [2, 3], "vLLM has them back"
    assert after(freed, load(2, 9)) == 5


def test_of_several_the_last_one_counts(freed: FreedBlocks, pool: Pool) -> None:
    steps(freed, 5)
    pool.free_blocks([Block(2)])
    steps(freed, 1)
    pool.free_blocks([Block(9)])
    steps(freed, 1)
    assert after(freed, load(2, 9)) == 6


def test_one_that_is_free_for_long_is_touched_by_no_step_that_may_be_under_way(
    freed: FreedBlocks, pool: Pool
) -> None:
    pool.free_blocks([Block(2)])
    steps(freed, KEPT)
    pool.free_blocks([Block(3)])
    assert after(freed, load(2, 9)) == 0


def test_what_is_forgotten_is_never_later_than_what_is_said_instead(freed: FreedBlocks, pool: Pool) -> None:
    for step in range(3 * KEPT):
        pool.free_blocks([Block(100 + step)])
        steps(freed, 1)
    said = [after(freed, load(100 + step)) for step in range(3 * KEPT)]
    assert all(found is not None and found >= step for step, found in enumerate(said))


@pytest.mark.parametrize(
    "output", [Output(new_block_ids_to_zero=[9]), Output(kv_cache_block_copies=[(1, 9)])]
)
def test_a_step_that_changes_blocks_beforehand_may_touch_those_of_its_own_loads(
    output: Output, freed: FreedBlocks
) -> None:
    assert after(freed, load(2, 9), output) is None


def test_other_blocks_that_a_step_zeroes_say_nothing_of_a_load(freed: FreedBlocks) -> None:
    assert after(freed, load(2, 9), Output(new_block_ids_to_zero=[1, 3])) is not None


def test_a_step_does_not_zero_the_blocks_of_a_load_that_it_uses(freed: FreedBlocks) -> None:
    output = Output(new_block_ids_to_zero=[1, 2, 9])
    assert after(freed, replace(load(2, 9), in_step=True), output) is not None
    assert output.new_block_ids_to_zero == [1]
    freed.scheduled([replace(load(1), in_step=True)], output)
    assert output.new_block_ids_to_zero is None


@pytest.mark.parametrize(("count", "spared"), [(2, True), (3, False)])
def test_it_is_known_whether_what_is_given_next_was_taken_back_lately(
    freed: FreedBlocks, pool: Pool, count: int, *, spared: bool
) -> None:
    steps(freed, 5)
    pool.free_blocks([Block(2), Block(3)])
    assert freed.spares(count, 1) is spared
    steps(freed, 1)
    assert freed.spares(count, 1), "the step that may touch them is over"
    assert freed.spares(count, 2) is spared
    steps(freed, 1)
    assert freed.spares(count, 2)


def test_of_a_pool_without_such_a_queue_nobody_knows(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    monkeypatch.setattr(Pool, "free_block_queue", None)
    freed = FreedBlocks()
    freed.watch(pool)
    assert freed.spares(3, 1)
    pool.free_blocks([Block(2)])
    assert not freed.spares(1, 1)


def test_more_than_are_free_are_not_spared(freed: FreedBlocks) -> None:
    assert freed.spares(3, 1)
    assert not freed.spares(4, 1)


def test_of_a_pool_that_nobody_watches_nothing_is_spared() -> None:
    assert not FreedBlocks().spares(0, 1)


def test_without_vllms_word_nothing_is_known() -> None:
    one = load(2, 9)
    assert FreedBlocks().last_use(one.block_ids) is None
    assert FreedBlocks().scheduled([one], PLAIN) == (0, False, [one])


def test_steps_are_counted(freed: FreedBlocks) -> None:
    assert [freed.scheduled([], PLAIN)[0] for _ in range(3)] == [1, 2, 3]


def test_a_step_is_marked_where_a_block_was_taken_back_since_the_one_before_it(
    freed: FreedBlocks, pool: Pool
) -> None:
    marked = []
    for step in range(1, 6):
        if step in (3, 5):
            pool.free_blocks([Block(step)])
        marked.append(freed.scheduled([], PLAIN)[1])
    assert marked == [True, False, True, False, True]


@given(st.lists(st.booleans(), min_size=1, max_size=5 * KEPT), st.integers(0, 40))
def test_a_load_finds_a_marked_step_behind_the_last_use_of_its_blocks_and_long_ago_of_others(
    frees: list[bool], block: int
) -> None:
    pool, freed, marks, used = Pool(), FreedBlocks(), [], 0
    freed.watch(pool)
    for step, takes_back in enumerate(frees):
        if takes_back:  # step 0 is none: before any there was nothing to touch a block
            pool.free_blocks([Block(step % 41)])
            used = step if step % 41 == block else used
        number, marked, _ = freed.scheduled([], PLAIN)
        marks += [number] * marked
    after = freed.last_use({block})
    assert after is not None
    assert not used or after >= used
    coming, marked, _ = freed.scheduled([], PLAIN)
    behind = next((number for number in [*marks, *[coming] * marked] if number > after), None)
    if len(frees) - used >= KEPT:
        assert behind is not None
        assert behind <= len(frees) - (KEPT - MARKED) + 1, "what is waited for was queued long ago"
    elif used:
        assert behind == used + 1, "what is waited for ends with the step that may touch them"
