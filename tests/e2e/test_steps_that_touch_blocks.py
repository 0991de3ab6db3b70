"""A load ignores no step that may touch its blocks: vLLM's own scheduler under random requests, stepped by hand.

Nothing computes, and kvd is one that says yes to everything. The pool is small, so blocks pass from one request to the
next at once; requests end by their length, and by being aborted while steps compute them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvd.vllm.params import finished_prefill
from tests.support.rigs.bench import KEY, prefill, prompt
from tests.support.rigs.stepped import OURS, PREFILLER, SteppedScheduler, WillingKvd, attention

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

BLOCK, POOL, STEPS, LONGEST = 16, 60, 400, 300
Open = Callable[..., SteppedScheduler]


def windowed() -> Any:
    """A layer that gives blocks up while its request goes on."""
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32, sliding_window=2 * BLOCK
    )


@pytest.fixture
def opened(model: Path, kvd: WillingKvd) -> Iterator[Open]:
    made: list[SteppedScheduler] = []

    def open_(groups: Sequence[Any], *, ahead: bool) -> SteppedScheduler:
        made.append(
            SteppedScheduler(
                model, OURS, groups, block=BLOCK, pool=POOL, longest=2 * LONGEST, chunk=64, ahead=ahead
            )
        )
        kvd.push(PREFILLER)
        return made[-1]

    yield open_
    for bench in made:
        bench.scheduler.shutdown()


def pulled(tokens: Sequence[int], groups: int) -> dict[str, Any]:
    """Params of a prefiller that has all of a prompt."""
    blocks = tuple(range(1, 1 + -(-len(tokens) // BLOCK)))
    digest = prompt(tokens).digest(KEY, len(tokens))
    sent = prefill((blocks,) * groups, tokens=len(tokens), digest=digest)
    return finished_prefill(sent, tp=1, pp=1, dcp=1)


class Traffic:
    """Random requests to one scheduler, and which blocks each of its steps may touch."""

    def __init__(self, bench: SteppedScheduler, groups: int, seed: int) -> None:
        self.bench = bench
        self.groups = groups
        self.random = random.Random(seed)
        self.touched: dict[int, set[int]] = {}
        self.loading: set[str] = set()
        self.number = 0

    def come_and_go(self) -> None:
        """New requests, of which some are loaded; one is aborted now and then."""
        live = self.bench.scheduler.requests
        while len(live) < self.random.randint(0, 5):
            self.number += 1
            tokens = [self.random.randrange(10, 500) for _ in range(self.random.randrange(20, LONGEST))]
            params = pulled(tokens, self.groups) if self.random.random() < 0.6 else None
            self.bench.arrive(f"r{self.number}", tokens, params, max_tokens=self.random.randint(1, 12))
        if live and self.random.random() < 0.1:
            from vllm.v1.request import RequestStatus

            gone = self.random.choice(sorted(live))
            self.bench.scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)

    def step(self) -> tuple[int, list[Any]]:
        """One step: its number, and the loads that it orders. Loads of before may end with it."""
        ended = {name for name in self.loading if self.random.random() < 0.5}
        self.loading -= ended
        computed, metadata = self.bench.step(finished_recving=ended)
        orders = metadata.orders
        self.loading |= {order.request_id for order in orders.loads}
        held = self.bench.scheduler.kv_cache_manager.get_block_ids
        self.touched[orders.number] = {
            block for name in computed for group in held(name) for block in group if block
        }
        return orders.number, orders.loads


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "ahead of results"])
@pytest.mark.parametrize("windows", [False, True], ids=["full attention", "windows"])
def test_no_step_that_a_load_ignores_touches_its_blocks(
    opened: Open, *, windows: bool, ahead: bool, seed: int
) -> None:
    groups = (attention(BLOCK), windowed()) if windows else (attention(BLOCK),)
    traffic = Traffic(opened(groups, ahead=ahead), len(groups), seed)
    ignoring = waiting = 0
    for _ in range(STEPS):
        traffic.come_and_go()
        number, loads = traffic.step()
        for load in loads:
            assert load.after is not None
            for step in range(load.after + 1, number):
                shared = traffic.touched.get(step, set()) & load.block_ids
                assert not shared, f"step {step} touches blocks {shared} of a load of step {number}"
            waiting += load.after == number - 1
            ignoring += load.after < number - 1
    assert waiting > 5, "some go into blocks that were taken back just now"
    assert ignoring > 5, "others need not wait for the step before them"
