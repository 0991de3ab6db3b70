"""When a prefix that another engine holds is read: in the step that sees its request, where the engine is idle."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvd.vllm.memory.groups import GroupFacts
from kvd.vllm.prefixes import seeker
from kvd.vllm.scheduler.half import SchedulerHalf
from kvd.wire.handshake import GetPeer
from kvd.wire.prefix import SCHEME_FACT, FindPrefix, PrefixFound
from kvd.worker.orders import StepOutcomes
from kvd.worker.settings import ConnectorSettings
from tests.support.rigs.bench import GENERATION, Script, facts
from tests.support.rigs.half import PEER, Request

BLOCK = 4
FOUND = PrefixFound(tokens=8, engine_id="p", generation=GENERATION, blocks=((5, 6),), first_blocks=(0,))


@dataclass
class Hashed(Request):
    block_hashes: list[bytes] = field(default_factory=lambda: [bytes([n]) * 32 for n in (1, 2)])
    num_in_flight_tokens: int = 0


@dataclass
class Sharing:
    """An engine's scheduler half, to which kvd answers while it waits. ``waits`` are the times that it did."""

    half: SchedulerHalf
    script: Script
    waits: list[float] = field(default_factory=list)

    def matched(self, request: Request) -> tuple[int | None, bool]:
        whose: Any = request
        return self.half.matched_tokens(whose, 0)


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Sharing]:
    def made(*, known: bool = True, together: int = 1) -> Sharing:
        script = Script()
        engine = facts("d")
        engine = msgspec.structs.replace(engine, facts={**engine.facts, SCHEME_FACT: "sha256/0"})
        settings = ConnectorSettings(prefixes="on", prefix_least=1)
        half = SchedulerHalf(settings, engine, [GroupFacts("full", BLOCK)], "recompute", script.open)
        pool = SimpleNamespace(hash_block_size=BLOCK, num_gpu_blocks=8, unpin_blocks=None)
        empty = SimpleNamespace(find_longest_cache_hit=lambda *_: ([[]], 0))
        half.prefixes.bind(SimpleNamespace(coordinator=empty, block_pool=pool), together)
        if known:
            script.push(PEER)
        found = Sharing(half, script)

        def wait(_answers: Any, seconds: float) -> None:
            found.waits.append(seconds)
            script.asked(FindPrefix)[-1].answer(FOUND)

        monkeypatch.setattr(seeker, "wait", wait)
        return found

    return made


def test_an_idle_engine_begins_to_read_in_the_step_that_sees_the_request(
    sharing: Callable[..., Sharing],
) -> None:
    engine = sharing()
    assert engine.matched(Hashed("r")) == (8, True)
    assert engine.waits == [seeker.IDLE_SECONDS]
    assert not engine.script.asked(GetPeer), "its own kvd has just named the engine"


def test_one_that_is_not_known_yet_is_asked_for_first(sharing: Callable[..., Sharing]) -> None:
    engine, request = sharing(known=False), Hashed("r")
    assert engine.matched(request) == (None, False)
    (asked,) = engine.script.asked(GetPeer)
    asked.answer(PEER)
    assert engine.matched(request) == (8, True)


def test_an_engine_that_has_requests_to_compute_goes_on_with_them(sharing: Callable[..., Sharing]) -> None:
    engine, other, request = sharing(), Hashed("other"), Hashed("r")
    running: Any = other
    engine.half.prefixes.allocated(running, ((),))
    assert engine.matched(request) == (None, False)
    assert not engine.waits
    engine.script.asked(FindPrefix)[0].answer(FOUND)
    assert engine.matched(request) == (8, True)
    engine.half.prefixes.finished(running)
    assert engine.matched(Hashed("later")) == (8, True)
    assert len(engine.waits) == 1


def test_of_requests_that_come_together_one_is_waited_for(
    sharing: Callable[..., Sharing], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, waits = sharing(), list[float]()
    monkeypatch.setattr(seeker, "wait", lambda _answers, seconds: waits.append(seconds))
    assert [engine.matched(Hashed(f"r{number}")) for number in range(5)] == [(None, False)] * 5
    assert len(waits) == 1


def test_an_engine_whose_steps_others_wait_for_waits_for_nobody(sharing: Callable[..., Sharing]) -> None:
    engine = sharing(together=2)
    assert engine.matched(Hashed("r")) == (None, False)
    assert not engine.waits


def test_an_engine_that_reads_have_cost_too_much_says_so_until_time_made_up_for_it(
    sharing: Callable[..., Sharing], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, now = sharing(), time.monotonic()
    running: Any = Hashed("running")
    engine.half.prefixes.allocated(running, ((),))
    question = FindPrefix(
        local_engine="e", reader="x", scheme="sha256/0", hash_tokens=BLOCK, hashes=b"", most=0
    )
    engine.half.loads_ended(set(), StepOutcomes(read_cost=0.1))
    assert engine.half.prefixes.answer(question) == PrefixFound(busy=True)
    monkeypatch.setattr(time, "monotonic", lambda: now + 60.0)
    assert engine.half.prefixes.answer(question) != PrefixFound(busy=True)


def test_an_idle_engine_has_time_to_be_read(sharing: Callable[..., Sharing]) -> None:
    engine, lockstep = sharing(), sharing(together=2)
    question = FindPrefix(
        local_engine="e", reader="x", scheme="sha256/0", hash_tokens=BLOCK, hashes=b"", most=0
    )
    for one in (engine, lockstep):
        one.half.loads_ended(set(), StepOutcomes(read_cost=0.1))
    assert engine.half.prefixes.answer(question) == PrefixFound()
    assert lockstep.half.prefixes.answer(question) == PrefixFound(busy=True), "others wait for its steps"
