"""What the workers are told to load for a claim that has blocks."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from kvd.vllm.memory.groups import GroupFacts
from kvd.vllm.scheduler.load_order import load_order
from kvd.worker.orders import LoadOrder
from tests.support.rigs.desk import SETTINGS, Desk, claimed

GROUP = GroupFacts("full", 4)
TABLE = ((7, 3, 9, 4),)


def ordered(desk: Desk, *, asked: list[AbstractSet[int]] | None = None) -> LoadOrder:
    def last_use(blocks: AbstractSet[int]) -> int:
        if asked is not None:
            asked.append(blocks)
        return 5

    return load_order(desk.claim, (GROUP,), TABLE, desk.claim.tokens, SETTINGS, None, (), last_use)


def test_it_is_asked_which_steps_may_touch_the_blocks_that_a_load_fills() -> None:
    desk, asked = Desk(), list[AbstractSet[int]]()
    order = ordered(desk, asked=asked)
    assert asked == [order.block_ids]
    assert order.after == 5


def test_what_missed_and_is_claimed_again_may_have_been_computed_into() -> None:
    desk = Desk()
    desk.claim.again = 1
    assert ordered(desk).after is None


def test_a_load_ends_before_its_lease_does() -> None:
    desk = Desk()
    desk.lease(claimed(20.0))
    desk.advance()
    assert 0 < ordered(desk).seconds <= 20.0
    desk.claim.beside = True
    assert ordered(desk).seconds == SETTINGS.load_timeout, "until the answer nobody knows when it ends"
