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


def groups_of(kind: str) -> list[Any]:
    """Layers of full attention, with some that give blocks up while their request goes on."""
    import torch
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

    full = attention(BLOCK)
    window = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32, sliding_window=2 * BLOCK
    )
    state = MambaSpec(
        block_size=BLOCK,
        shapes=((3, 24), (2, 16, 16)),
        dtypes=(torch.float32, torch.float32),
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        mamba_cache_mode="align",
        page_size_padded=full.page_size_bytes,
    )
    return {"full attention": [full], "windows": [full, window], "states": [full, state]}[kind]


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


def pulled(tokens: Sequence[int], kind: str) -> dict[str, Any]:
    """Params of a prefiller that has all of a prompt, but for the last token where there is a state."""
    count = len(tokens) - (kind == "states")
    last = -(-count // BLOCK) - 1
    whole = tuple(range(1, 2 + last))
    blocks, first = {
        "full attention": ((whole,), (0,)),
        "windows": ((whole, whole), (0, 0)),
        "states": ((whole, whole[-1:]), (0, last)),
    }[kind]
    digest = prompt(tokens).digest(KEY, count)
    return finished_prefill(prefill(blocks, tokens=count, first=first, digest=digest), tp=1, pp=1, dcp=1)


class Traffic:
    """Random requests to one scheduler, and which blocks each of its steps may touch."""

    def __init__(self, bench: SteppedScheduler, kind: str, seed: int) -> None:
        self.bench = bench
        self.kind = kind
        self.random = random.Random(seed)
        self.touched: dict[int, set[int]] = {}
        self.loading: set[str] = set()
        self.number = 0
        self._schedule = bench.scheduler.schedule
        bench.scheduler.schedule = self._noted

    def come_and_go(self) -> None:
        """New requests, of which some are loaded; one is aborted now and then."""
        live = self.bench.scheduler.requests
        while len(live) < self.random.randint(0, 5):
            self.number += 1
            tokens = [self.random.randrange(10, 500) for _ in range(self.random.randrange(20, LONGEST))]
            params = pulled(tokens, self.kind) if self.random.random() < 0.6 else None
            self.bench.arrive(f"r{self.number}", tokens, params, max_tokens=self.random.randint(1, 12))
        if live and self.random.random() < 0.1:
            from vllm.v1.request import RequestStatus

            gone = self.random.choice(sorted(live))
            self.bench.scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)

    def step(self) -> tuple[int, list[Any]]:
        """One step: its number, and the loads that it orders. Loads of before may end with it."""
        ended = {name for name in sorted(self.loading) if self.random.random() < 0.5}
        self.loading -= ended
        _, metadata = self.bench.step(finished_recving=ended)
        orders = metadata.orders
        self.loading |= {order.request_id for order in orders.loads}
        return orders.number, orders.loads

    def _noted(self) -> Any:
        """Schedule, and note what the step's requests hold, before any of them can have ended."""
        output = self._schedule()
        held = self.bench.scheduler.kv_cache_manager.get_block_ids
        number = output.kv_connector_metadata.orders.number
        self.touched[number] = {
            block for name in output.num_scheduled_tokens for group in held(name) for block in group if block
        }
        return output


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "ahead of results"])
@pytest.mark.parametrize("kind", ["full attention", "windows", "states"])
def test_no_step_that_a_load_ignores_touches_its_blocks(
    opened: Open, *, kind: str, ahead: bool, seed: int
) -> None:
    traffic = Traffic(opened(groups_of(kind), ahead=ahead), kind, seed)
    ignoring = waiting = 0
    for _ in range(STEPS):
        traffic.come_and_go()
        number, loads = traffic.step()
        for load in loads:
            if load.after is None:  # it waits for all steps
                assert kind == "states", "no other step zeroes blocks"
                continue
            for step in range(load.after + 1, number):
                shared = traffic.touched.get(step, set()) & load.block_ids
                assert not shared, f"step {step} touches blocks {shared} of a load of step {number}"
            waiting += load.after == number - 1
            ignoring += load.after < number - 1
    assert waiting > 5, "some go into blocks that were taken back just now"
    assert ignoring > 5, "others need not wait for the step before them"
