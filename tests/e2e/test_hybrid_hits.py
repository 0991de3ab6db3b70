"""What a decoder of a hybrid finds in its own cache and what is moved: ours and vLLM's NIXL connector, side by side.

vLLM's own scheduler and caches, stepped by hand; no engine, no model that runs, and kvd says yes to everything.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvd.vllm.params import CONTRACT, finished_prefill
from tests.support.rigs.bench import KEY, prefill, prompt
from tests.support.rigs.stepped import OURS, PREFILLER, SteppedScheduler, WillingKvd, attention

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

BLOCK = 384
CHUNK = 5 * BLOCK
FIRST = [token % 500 for token in range(7, 2507)]
LONGER = FIRST + [token % 499 for token in range(300)]
STOCK = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
CONNECTORS = {"KvdConnector": OURS, "stock NIXL": STOCK}
ORDERS = 40
STATES = 3
"""Groups of states; one of attention comes behind them."""
KINDS = ("GDN_ATTN", "MAMBA2")


def groups_of(kind: str, *, shapes: int = 0, windows: int = 0) -> list[Any]:
    import torch
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    full = attention(BLOCK)
    state = MambaSpec(
        block_size=BLOCK,
        shapes=((3, 24), (2, 16, 16)),
        dtypes=(torch.float32, torch.float32),
        mamba_type=MambaAttentionBackendEnum[kind],
        mamba_cache_mode="align",
        page_size_padded=full.page_size_bytes,
    )
    window = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32, sliding_window=600
    )
    other = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32)
    return [state] * STATES + [full] + [other] * shapes + [window] * windows


Open = Callable[..., SteppedScheduler]


@pytest.fixture
def opened(model: Path, kvd: WillingKvd) -> Iterator[Open]:
    """Decoders with a connector of `CONNECTORS`."""
    made: list[SteppedScheduler] = []

    def open_(
        name: str, kind: str = KINDS[0], *, shapes: int = 0, windows: int = 0, **more: Any
    ) -> SteppedScheduler:
        connector, groups = {**CONNECTORS[name], **more}, groups_of(kind, shapes=shapes, windows=windows)
        made.append(SteppedScheduler(model, connector, groups, block=BLOCK, longest=4096, chunk=CHUNK))
        if name == "KvdConnector":
            kvd.push(PREFILLER)  # as kvd does ahead of requests
        return made[-1]

    yield open_
    for decoder in made:
        decoder.scheduler.shutdown()


def prefilled(tokens: Sequence[int], others: int = 0) -> dict[str, Any]:
    """What a prefiller answers, with the entries of both connectors: all tokens but the last, a state at their end."""
    count = len(tokens) - 1
    attended = tuple(range(20, 20 - (-count // BLOCK)))
    blocks = *((7 + group,) for group in range(STATES)), *[attended] * (1 + others)
    digest = prompt(tokens[:count]).digest(KEY, count)
    return finished_prefill(prefill(blocks, tokens=count, digest=digest), tp=1, pp=1, dcp=1)


def pushed(tokens: Sequence[int]) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_mode": "push",
        "kvd_transfer_id": f"{len(tokens)} tokens at {time.monotonic()}",
        "remote_engine_id": "p",
        "remote_host": "h",
        "remote_port": 7,
        "kvd_contract": CONTRACT,
    }


def asked(
    decoder: SteppedScheduler,
    name: str,
    tokens: Sequence[int],
    params: dict[str, Any],
    *,
    missed: bool = False,
) -> tuple[int, int, int]:
    """Have a prompt decoded; the tokens hit in the decoder's cache, moved, and computed in its first step."""
    request = decoder.arrive(name, tokens, params)
    found = request.prefill_stats  # a step that has an answer takes it from the request
    computed, _ = decoder.step()
    hit, moved = found.num_local_cached_tokens, found.num_external_cached_tokens
    if request.status.name == "WAITING_FOR_REMOTE_KVS":
        assert computed == {}
        decoder.step(finished_recving={name}, failed_recving={name} if missed else set())
        computed, _ = decoder.step()
    decoder.run_out()
    assert len(request.output_token_ids) == 5
    return hit, moved, computed[name]


@pytest.mark.parametrize("name", CONNECTORS)
def test_what_attention_has_here_is_not_moved_again(opened: Open, name: str) -> None:
    decoder = opened(name)
    assert asked(decoder, "first", FIRST, prefilled(FIRST)) == (0, 2499, 1)
    assert asked(decoder, "again", FIRST, prefilled(FIRST)) == (2304, 195, 1)
    assert asked(decoder, "longer", LONGER, prefilled(LONGER)) == (2304, 495, 1)
    assert asked(decoder, "longer again", LONGER, prefilled(LONGER)) == (2688, 111, 1)


def test_it_is_not_pushed_again_either(opened: Open) -> None:
    decoder = opened("KvdConnector", "MAMBA2", kv_connector_extra_config={"mode": "push"})
    found = [asked(decoder, str(i), p, pushed(p)) for i, p in enumerate((FIRST, FIRST, LONGER, LONGER))]
    assert found == [(0, 2499, 1), (2304, 195, 1), (2304, 495, 1), (2688, 111, 1)]


def test_a_load_brings_the_state_of_every_group_and_the_attention_that_is_missing(opened: Open) -> None:
    decoder = opened("KvdConnector")
    asked(decoder, "first", FIRST, prefilled(FIRST))
    decoder.arrive("again", FIRST, prefilled(FIRST))
    (order,) = decoder.step()[1].orders.loads
    *states, full = decoder.scheduler.kv_cache_manager.get_block_ids("again")
    assert (order.computed, order.tokens) == (2304, 2499)
    assert order.groups == {**{g: (0, (ids[-1],)) for g, ids in enumerate(states)}, 3: (6, (full[6],))}


@pytest.mark.parametrize("name", CONNECTORS)
def test_after_a_miss_nothing_is_computed_behind_a_state_that_did_not_come(opened: Open, name: str) -> None:
    """What is computed instead is kept, states and all: the next miss costs the tail alone."""
    decoder = opened(name)
    asked(decoder, "first", FIRST, prefilled(FIRST))
    assert asked(decoder, "missed", FIRST, prefilled(FIRST), missed=True) == (2304, 195, CHUNK)
    assert asked(decoder, "again", FIRST, prefilled(FIRST)) == (2304, 195, 1)
    assert asked(decoder, "missed again", FIRST, prefilled(FIRST), missed=True) == (2304, 195, 196)


@pytest.mark.parametrize("name", CONNECTORS)
def test_a_prompt_that_is_nobodys_prefill_is_not_begun_behind_attention_alone(
    opened: Open, name: str
) -> None:
    decoder = opened(name)
    asked(decoder, "first", FIRST, prefilled(FIRST))
    assert asked(decoder, "plain", FIRST, {}) == (0, 0, CHUNK)
    assert asked(decoder, "plain again", FIRST, {}) == (2304, 0, 196)


@pytest.mark.parametrize("name", CONNECTORS)
def test_a_state_that_came_for_the_end_of_a_block_is_kept_as_long_as_it_is_cached(
    opened: Open, name: str
) -> None:
    prompt_ = FIRST[: 6 * BLOCK + 1]
    decoder = opened(name)
    decoder.arrive("first", prompt_, prefilled(prompt_))
    decoder.step()
    states = [ids[-1] for ids in decoder.scheduler.kv_cache_manager.get_block_ids("first")[:STATES]]
    decoder.step(finished_recving={"first"})
    decoder.run_out()
    assert asked(decoder, "again", prompt_, prefilled(prompt_)) == (2304, 0, 1)
    decoder.scheduler.kv_cache_manager.evict_blocks(set(states[:1]))
    assert asked(decoder, "evicted", prompt_, prefilled(prompt_))[2] == CHUNK


@pytest.mark.parametrize("name", CONNECTORS)
def test_a_request_that_was_preempted_is_not_resumed_behind_attention_alone(opened: Open, name: str) -> None:
    decoder = opened(name)
    asked(decoder, "first", FIRST, prefilled(FIRST))
    request = decoder.arrive("again", FIRST, prefilled(FIRST))
    decoder.step()
    decoder.step(finished_recving={"again"})
    assert decoder.step()[0] == {"again": 1}
    decoder.scheduler.running.remove(request)
    decoder.scheduler._preempt_request(request, 0.0)
    assert decoder.step()[0] == {"again": CHUNK}
    decoder.run_out()
    assert len(request.output_token_ids) == 5


@pytest.mark.parametrize("others", [(0, 1), (1, 0), (1, 1)], ids=["window", "other_heads", "both"])
@pytest.mark.parametrize("name", CONNECTORS)
def test_beside_windows_and_attention_of_another_shape_full_attention_is_not_moved_again(
    opened: Open, name: str, others: tuple[int, int]
) -> None:
    shapes, windows = others
    decoder = opened(name, shapes=shapes, windows=windows)
    asked_for = [(tokens, prefilled(tokens, sum(others))) for tokens in (FIRST, FIRST, LONGER, LONGER)]
    found = [asked(decoder, str(i), *one) for i, one in enumerate(asked_for)]
    assert found == [(0, 2499, 1), (2304, 195, 1), (2304, 495, 1), (2688, 111, 1)]


def test_of_a_window_what_its_own_cache_lacks_comes_with_the_load(opened: Open) -> None:
    decoder = opened("KvdConnector", windows=1)
    params = prefilled(FIRST, 1)
    asked(decoder, "first", FIRST, params)
    evicted = decoder.arrive("evicted", FIRST, params)
    decoder.step()
    window = decoder.scheduler.kv_cache_manager.get_block_ids("evicted")[-1]
    decoder.step(finished_recving={"evicted"})
    decoder.run_out()
    assert evicted.is_finished()
    decoder.scheduler.kv_cache_manager.evict_blocks(set(window[4:6]))
    decoder.arrive("again", FIRST, params)
    (order,) = decoder.step()[1].orders.loads
    *_, full, window = decoder.scheduler.kv_cache_manager.get_block_ids("again")
    assert order.computed == 2304
    assert order.groups[STATES] == (6, (full[6],))
    assert order.groups[STATES + 1] == (4, tuple(window[4:7]))


@pytest.mark.parametrize("seed", range(4))
def test_random_orders_misses_evictions_and_preemptions_hit_what_they_hit_with_stock(
    opened: Open, seed: int
) -> None:
    found = {name: _driven(opened(name, shapes=seed % 2, windows=1), seed) for name in CONNECTORS}
    ours, stock = found["KvdConnector"], found["stock NIXL"]
    assert len(ours) == len(stock) == ORDERS
    assert any(hit for hit, _ in ours)
    assert [one for one, other in zip(ours, stock, strict=True) if one[0] < other[0]] == []


def _driven(decoder: SteppedScheduler, seed: int) -> list[tuple[int, int]]:
    """Tokens hit and moved of each of `ORDERS` requests, among which things go wrong, the same for each connector."""
    chance, groups = random.Random(seed), len(decoder.caches.kv_cache_groups)
    found = []
    for number in range(ORDERS):
        tokens = [token % 498 for token in range(number)] if chance.random() < 0.1 else []
        tokens = tokens + LONGER[: chance.choice((700, 1200, 2000, 2500, 2800))]
        what = chance.choice(("load", "load", "load", "miss", "evict", "preempt"))
        evicted = chance.randrange(groups), chance.random()
        name = f"{number} {what}"
        request = decoder.arrive(name, tokens, prefilled(tokens, groups - STATES - 1))
        counted = request.prefill_stats
        decoder.step()
        found.append((counted.num_local_cached_tokens, counted.num_external_cached_tokens))
        table = decoder.scheduler.kv_cache_manager.get_block_ids(name)
        if request.status.name == "WAITING_FOR_REMOTE_KVS":
            decoder.step(finished_recving={name}, failed_recving={name} if what == "miss" else set())
        if what == "preempt" and request in decoder.scheduler.running:
            decoder.scheduler.running.remove(request)
            decoder.scheduler._preempt_request(request, 0.0)
        decoder.run_out()
        if what == "evict":
            ids = [block for block in table[evicted[0]] if block]
            decoder.scheduler.kv_cache_manager.evict_blocks(set(ids[int(evicted[1] * len(ids)) :]))
    return found
