"""What a holder names and what it vouches for, on vLLM's own scheduler and caches, stepped by hand.

The memory is a table here. A token's place is torn from when a step that writes it is scheduled until its result is
taken: no worker does it sooner or later.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from kvd.vllm.prefixes.boundaries import Boundaries
from kvd.vllm.prefixes.sharing import Prefixes
from kvd.wire.frame import Message
from kvd.wire.limits import MOST
from kvd.wire.prefix import SCHEME_FACT, CheckPrefix, FindPrefix, PrefixFound, PrefixKept
from kvd.wire.prefixes.hints import TAG_BYTES
from tests.support.rigs.bench import GENERATION
from tests.support.rigs.stepped import OURS, SteppedScheduler, WillingKvd, attention, latents

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

BLOCK, WINDOW = 16, 40
SHARING = {**OURS, "kv_connector_extra_config": {"prefixes": "on", "prefix_least": 1 << 20}}
"""It asks for no prefix itself."""
TORN = "torn"


def window(block: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(
        block_size=block, num_kv_heads=1, head_size=16, dtype=torch.float32, sliding_window=WINDOW
    )


KINDS = {"full": (attention,), "window+full": (window, attention), "latents": (latents,)}


@dataclass
class Holder:
    """A scheduler whose cache is shared, and its memory: by group, block and place, the tokens so far."""

    stepped: SteppedScheduler
    memory: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    under_way: list[dict[tuple[int, int, int], Any]] = field(default_factory=list)
    asked: int = 0

    def __post_init__(self) -> None:
        scheduler = self.stepped.scheduler
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def scheduled() -> Any:
            computed = {name: one.num_computed_tokens for name, one in scheduler.requests.items()}
            output = schedule()
            writes = {}
            for name, count in output.num_scheduled_tokens.items():
                request = scheduler.requests[name]
                tables = scheduler.kv_cache_manager.get_block_ids(name)
                begin = request.num_computed_tokens - count
                assert begin >= computed[name] or request.num_preemptions
                for at in range(begin, begin + count):
                    for group, table in enumerate(tables):
                        if (block := table[at // BLOCK]) != 0:
                            writes[group, block, at % BLOCK] = tuple(request.all_token_ids[: at + 1])
            self.memory.update(dict.fromkeys(writes, TORN))
            self.under_way.append(writes)
            return output

        def updated(*told: Any) -> Any:
            self.memory.update(self.under_way.pop(0))
            return update(*told)

        scheduler.schedule, scheduler.update_from_output = scheduled, updated

    @property
    def prefixes(self) -> Prefixes:
        return cast("Prefixes", self.stepped.scheduler.connector._scheduler.prefixes)

    def hashes(self, tokens: Sequence[int], salt: str = "") -> list[bytes]:
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        request = Request(
            request_id="asks",
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=salt or None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        return list(request.block_hashes)

    def find(
        self, tokens: Sequence[int], most: int | None = None, salt: str = "", reader: str = ""
    ) -> tuple[str, PrefixFound]:
        self.asked += 1
        reader = reader or f"reader {self.asked}"
        scheme = self.stepped.scheduler.connector._engine.facts[SCHEME_FACT]
        question = FindPrefix(
            local_engine="asker",
            reader=reader,
            scheme=scheme,
            hash_tokens=BLOCK,
            hashes=b"".join(self.hashes(tokens, salt)),
            most=len(tokens) - 1 if most is None else most,
        )
        found = self.prefixes.answer(question)
        assert isinstance(found, PrefixFound)
        return reader, found

    def kept(self, reader: str) -> bool:
        kept = self.prefixes.answer(CheckPrefix(engine_id="d", generation="g", reader=reader))
        assert isinstance(kept, PrefixKept)
        return kept.kept

    def read(self, found: PrefixFound) -> dict[tuple[int, int], Any]:
        """What stands in the blocks that were named, by group and token."""
        return {
            (group, (first + i) * BLOCK + at): self.memory.get((group, block, at))
            for group, (first, ids) in enumerate(zip(found.first_blocks, found.blocks, strict=True))
            for i, block in enumerate(ids)
            for at in range(BLOCK)
        }


def holder(model: Path, kinds: str = "full", **options: Any) -> Holder:
    groups = [make(BLOCK) for make in KINDS[kinds]]
    return Holder(SteppedScheduler(model, SHARING, groups, block=BLOCK, **options))


@pytest.mark.usefixtures("kvd")
def test_a_prefix_is_named_once_it_is_computed(model: Path) -> None:
    """Also while its request goes on; never before its step's result is there."""
    one, tokens = holder(model, ahead=True), list(range(10, 10 + 3 * BLOCK))
    one.stepped.arrive("r", [*tokens, 5], None)
    seen = []
    for _ in range(4):
        one.stepped.step()
        seen.append(one.find([*tokens, 9])[1].tokens)
    assert seen == [0, 0, 3 * BLOCK, 3 * BLOCK]
    reader, found = one.find([*tokens, 9])
    one.stepped.run_out()
    assert one.find([*tokens, 9])[1].blocks == found.blocks
    assert one.kept(reader)


@pytest.mark.usefixtures("kvd")
def test_a_prefix_of_another_salt_is_nobodys(model: Path) -> None:
    one, tokens = holder(model), list(range(10, 10 + 3 * BLOCK))
    one.stepped.arrive("r", [*tokens, 5], None)
    one.stepped.run_out()
    assert one.find([*tokens, 9])[1].tokens == 3 * BLOCK
    assert one.find([*tokens, 9], salt="other")[1] == PrefixFound()
    assert one.find([*tokens[:-1], 1, 9])[1].tokens == 2 * BLOCK


@pytest.mark.usefixtures("kvd")
def test_a_cache_that_is_reset_vouches_for_nothing(model: Path) -> None:
    one, tokens = holder(model), list(range(10, 10 + 3 * BLOCK))
    one.stepped.arrive("r", [*tokens, 5], None)
    one.stepped.run_out()
    reader, _ = one.find([*tokens, 9])
    assert one.stepped.scheduler.reset_prefix_cache()
    assert not one.kept(reader)
    assert one.find([*tokens, 9])[1].tokens == 0
    assert not one.kept("nobody")


@pytest.mark.usefixtures("kvd")
def test_what_peers_read_is_given_away_later(model: Path) -> None:
    """As after a hit of its own: of two prefixes the older one stays, since it was read."""
    one = holder(model, pool=9, chunk=64)
    older, newer = [1] * BLOCK * 3, [2] * BLOCK * 3
    for name, tokens in (("older", older), ("newer", newer)):
        one.stepped.arrive(name, [*tokens, 5], None, max_tokens=1)
        one.stepped.run_out()
    reader, found = one.find([*older, 9])
    one.stepped.arrive("other", [3] * BLOCK, None, max_tokens=1)
    one.stepped.step()  # the refresh comes behind this step's own blocks
    one.stepped.run_out()
    one.stepped.arrive("another", [4] * BLOCK * 2, None, max_tokens=1)
    one.stepped.run_out()
    assert found.tokens == 3 * BLOCK
    assert one.kept(reader)
    assert one.find([*newer, 9])[1].tokens < 3 * BLOCK


@pytest.mark.usefixtures("kvd")
def test_a_reader_that_was_told_twice_may_have_read_either(model: Path) -> None:
    """Its kvd may ask an engine for its hints, and in the same moment all engines of a host that tells none."""
    one, tokens = holder(model, pool=6, chunk=64), [1] * BLOCK * 3
    one.stepped.arrive("r", [*tokens, 5], None, max_tokens=1)
    one.stepped.run_out()
    reader, first = one.find([*tokens, 9])
    # Of five blocks it takes three: the prefix loses its last one.
    one.stepped.arrive("other", [3] * BLOCK * 3, None, max_tokens=1)
    one.stepped.run_out()
    _, second = one.find([*tokens, 9], reader=reader)
    assert 0 < second.tokens < first.tokens == 3 * BLOCK
    assert not one.kept(reader)
    assert one.kept(one.find([*tokens, 9])[0])


@pytest.mark.usefixtures("kvd")
def test_of_too_many_blocks_that_readers_were_told_of_the_oldest_are_forgotten(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.vllm.prefixes.holder.MOST_TOLD_BLOCKS", 6)
    one, tokens = holder(model), list(range(10, 10 + 3 * BLOCK))
    one.stepped.arrive("r", [*tokens, 5], None)
    one.stepped.run_out()
    readers = [one.find([*tokens, 9])[0] for _ in range(3)]
    assert [one.kept(reader) for reader in readers] == [False, True, True]


@pytest.mark.parametrize("ahead", [False, True], ids=["steps", "steps ahead"])
@pytest.mark.parametrize("kinds", list(KINDS))
@pytest.mark.usefixtures("kvd")
def test_what_a_holder_vouches_for_is_what_was_read(model: Path, kinds: str, *, ahead: bool) -> None:
    """Prompts with common beginnings in a cache that is far too small, some given up; looked at all the time."""
    dice = random.Random(f"{kinds} {ahead}")
    one = holder(model, kinds, ahead=ahead, pool=30, chunk=48)
    heads = [[dice.randrange(10, 500) for _ in range(5 * BLOCK)] for _ in range(4)]
    reads: list[tuple[str, list[int], PrefixFound, dict[tuple[int, int], Any]]] = []
    vouched = refused = 0
    for step in range(600):
        if len(one.stepped.scheduler.requests) < 4:
            prompt = [
                *dice.choice(heads)[: dice.randrange(1, 81)],
                *(dice.randrange(10, 500) for _ in range(40)),
            ]
            one.stepped.arrive(f"r{step}", prompt, None, max_tokens=dice.randrange(1, 40))
        if dice.random() < 0.05 and (running := list(one.stepped.scheduler.requests)):
            from vllm.v1.request import RequestStatus

            one.stepped.scheduler.finish_requests(dice.choice(running), RequestStatus.FINISHED_ABORTED)
        one.stepped.step()
        if dice.random() < 0.5:
            tokens = [*dice.choice(heads), 9]
            reader, found = one.find(tokens)
            if found.tokens:
                reads.append((reader, tokens, found, {}))
        waiting = []
        for reader, tokens, found, earlier in reads:
            read = earlier or one.read(found)  # as soon as it is told, or later
            if dice.random() < 0.9:
                waiting.append((reader, tokens, found, read if dice.random() < 0.5 else earlier))
                continue
            if one.kept(reader):
                vouched += 1
                assert read == {place: tuple(tokens[: place[1] + 1]) for place in read}
                assert {place[1] for place in read if place[0] == len(KINDS[kinds]) - 1} == set(
                    range(found.tokens)
                )
            else:
                refused += 1
        reads = waiting
    assert min(vouched, refused) > 20, (vouched, refused)


@pytest.mark.parametrize("kinds", list(KINDS))
@pytest.mark.usefixtures("kvd")
def test_each_prefix_that_is_found_is_hinted(model: Path, kinds: str) -> None:
    """Whatever is evicted meanwhile. A hint on what is not found any more is rare."""
    dice = random.Random(kinds)
    one = holder(model, kinds, pool=30, chunk=48)
    assert one.prefixes._holder is not None
    hints = one.prefixes._holder.cache.boundaries = Boundaries(len(KINDS[kinds]), BLOCK, 1)
    heads = [[dice.randrange(10, 500) for _ in range(5 * BLOCK)] for _ in range(4)]
    found = more = 0
    for step in range(300):
        if len(one.stepped.scheduler.requests) < 4:
            own = [dice.randrange(10, 500) for _ in range(40)]
            prompt = [*dice.choice(heads)[: dice.randrange(1, 81)], *own]
            one.stepped.arrive(f"r{step}", prompt, None, max_tokens=dice.randrange(1, 40))
        one.stepped.step()
        tokens = [*dice.choice(heads), 9]
        told = hints.change().added
        tags = {told[at : at + TAG_BYTES] for at in range(0, len(told), TAG_BYTES)}
        ends = [at for at, name in enumerate(one.hashes(tokens), 1) if name[:TAG_BYTES] in tags]
        held, hinted = one.find(tokens)[1].tokens, max(ends, default=0) * BLOCK
        assert held <= hinted
        found += held > 0
        more += hinted > held
    assert found > 40
    assert more < found / 4, (more, found)


@pytest.mark.parametrize(
    "groups", [(attention,), (window,), (window, attention)], ids=["full", "window", "both"]
)
@pytest.mark.usefixtures("kvd")
def test_who_asks_for_more_tokens_than_it_names_is_answered_as_one_who_does_not(
    model: Path, groups: tuple[Any, ...]
) -> None:
    """Of layers with a window vLLM makes a list of as many blocks as are asked for: 2**59 of them are not there."""
    one = Holder(SteppedScheduler(model, SHARING, [make(BLOCK) for make in groups], block=BLOCK))
    tokens = list(range(10, 10 + 5 * BLOCK))
    one.stepped.arrive("r", [*tokens, 5], None)
    one.stepped.run_out()
    honest = one.find([*tokens, 9])[1]
    assert honest.tokens == 5 * BLOCK
    for most in (7 * BLOCK, 1 << 20, MOST):
        assert one.find([*tokens, 9], most)[1] == honest


class Lying(WillingKvd):
    """A kvd that holds of each prompt what it is told to say."""

    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__()
        self.told_found = told

    def call(self, message: Message, timeout: float) -> Future[Message]:
        future = super().call(message, timeout)
        if isinstance(message, FindPrefix):
            honest = PrefixFound(
                tokens=2 * BLOCK, engine_id="p", generation=GENERATION, blocks=((1, 2),), first_blocks=(0,)
            )
            future.set_result(msgspec.structs.replace(honest, **self.told_found))
        return future


@pytest.mark.parametrize(
    ("told", "computed"),
    [
        ({}, 0),
        ({"tokens": 1 << 40}, 41),
        ({"tokens": 41}, 41),
        ({"tokens": BLOCK + 1}, 41),
        ({"blocks": ()}, 41),
        ({"blocks": ((1,), (2,))}, 41),
        ({"first_blocks": (1 << 40,)}, 41),
        ({"blocks": ((1, 1 << 40),)}, 41),
        ({"engine_id": "d"}, 41),
        ({"generation": ""}, 41),
    ],
    ids=str,
)
def test_an_answer_that_cannot_be_is_not_used_and_ends_no_engine(
    model: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, Any], computed: int
) -> None:
    """vLLM takes it that no more tokens are loaded than a prompt has, and ends where there are."""
    lying = Lying(told)
    monkeypatch.setattr("kvd.vllm.connector.KvdSession", lambda card, push, **_: lying.open(card, push))
    sharing = {**SHARING, "kv_connector_extra_config": {"prefixes": "on", "prefix_least": BLOCK}}
    stepped = SteppedScheduler(model, sharing, [attention(BLOCK)], block=BLOCK)
    stepped.arrive("r", range(10, 51), None)
    assert sum(stepped.step()[0].values()) == computed
