"""From when on a block is held that a step computes: once that step is over, whoever has the block."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvd.vllm.memory.groups import GroupFacts
from kvd.vllm.prefixes.cache import PrefixCache
from kvd.vllm.prefixes.holder import PrefixHolder
from kvd.wire.prefix import FindPrefix, PrefixFound
from tests.support.rigs.half import Request

BLOCK = 16
HASH = b"h" * 32


@dataclass
class Block:
    block_id: int
    block_hash: bytes | None = None
    is_null: bool = False
    ref_cnt: int = 1


@dataclass
class Computing(Request):
    num_in_flight_tokens: int = 0


@dataclass
class Engine:
    """Whose steps are scheduled while those before them run. All prompts begin with one ``block``."""

    block: Block = field(default_factory=lambda: Block(1, HASH + bytes(4)))
    requests: dict[str, Any] = field(default_factory=dict)
    busy: bool = False

    def __post_init__(self) -> None:
        groups = [GroupFacts("full", BLOCK)]
        pool = SimpleNamespace(
            hash_block_size=BLOCK, num_gpu_blocks=8, touch=lambda _: None, unpin_blocks=lambda *_: None
        )
        coordinator = SimpleNamespace(find_longest_cache_hit=lambda *_: ([[self.block]], BLOCK))
        self.cache = PrefixCache(SimpleNamespace(coordinator=coordinator, block_pool=pool), groups)
        self.holder = PrefixHolder(self.cache, groups, "sha256/0", lambda: self.busy)

    def arrive(self, name: str, cached: int, *more: Block) -> None:
        request: Any = Computing(name, num_computed_tokens=cached)
        self.requests[name] = request
        self.holder.allocated(request, [[self.block, *more]])

    def schedule(self, **tokens: int) -> None:
        step: Any = SimpleNamespace(num_scheduled_tokens=tokens)
        self.holder.step(step)
        for name, count in tokens.items():
            self.requests[name].num_computed_tokens += count
            self.requests[name].num_in_flight_tokens += count

    def end(self, **tokens: int) -> None:
        """The step of so many tokens is over."""
        for name, count in tokens.items():
            self.requests[name].num_in_flight_tokens -= count

    @property
    def held(self) -> bool:
        return self.cache.look_up([HASH], 0, BLOCK) is not None


def test_a_block_is_held_once_the_step_that_computes_it_is_over() -> None:
    engine = Engine()
    engine.arrive("r", 0)
    engine.schedule(r=BLOCK)
    engine.schedule(r=1)
    assert not engine.held
    engine.end(r=BLOCK)
    engine.schedule(r=1)
    assert engine.held


def test_also_where_a_second_request_has_it_whose_own_part_counts_as_computed_at_once() -> None:
    engine = Engine()
    engine.arrive("r", 0)
    engine.arrive("s", BLOCK, Block(2))
    engine.schedule(r=BLOCK, s=4)
    engine.schedule(r=1, s=1)
    assert not engine.held
    engine.holder.finished(engine.requests["s"])
    assert not engine.held, "it was aborted meanwhile"
    engine.end(r=BLOCK, s=4)
    engine.schedule(r=1)
    assert engine.held


def test_a_block_that_was_held_already_is_so_when_the_first_step_of_its_next_request_is_over() -> None:
    engine = Engine()
    engine.arrive("r", BLOCK, Block(2))
    engine.schedule(r=1)
    assert not engine.held
    engine.end(r=1)
    engine.holder.finished(engine.requests["r"])
    assert engine.held


def test_nobody_is_told_of_what_is_held_where_reads_have_cost_too_much() -> None:
    engine = Engine()
    engine.arrive("r", 0)
    engine.schedule(r=BLOCK)
    engine.end(r=BLOCK)
    engine.schedule(r=1)
    asked = FindPrefix(
        local_engine="d", reader="x", scheme="sha256/0", hash_tokens=BLOCK, hashes=HASH, most=BLOCK
    )
    assert engine.holder.answer(asked) == PrefixFound(tokens=BLOCK, blocks=((1,),), first_blocks=(0,))
    engine.busy = True
    assert engine.holder.answer(asked) == PrefixFound(busy=True)
    other = FindPrefix(
        local_engine="d", reader="x", scheme="other", hash_tokens=BLOCK, hashes=HASH, most=BLOCK
    )
    assert engine.holder.answer(other) == PrefixFound()
