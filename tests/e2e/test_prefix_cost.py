"""An engine that is short of processors is read over TCP no more than it may cost, and all answers are right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.prefix_chats import WIDE
from kvctl.demo.engine import EngineProcess
from tests.support.daemons import wait_for
from tests.support.deployments import prompt_of
from tests.support.engine_calls import reset_prefix_cache
from tests.support.engine_pids import engine_pids
from tests.support.sharing import sharing
from tests.support.tiny_models import MODELS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TOKENS, BLOCK, MOST_READS = 2000, 128, 60


def on_one_processor(engine: EngineProcess) -> None:
    """The engine has nowhere to run a thread of its transfer engine beside its own."""
    for pid in engine_pids(engine).all:
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {min(os.sched_getaffinity(0))})


def test_a_holder_without_a_free_processor_turns_reads_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, WIDE.name, WIDE)
    with sharing(
        WIDE.name, tmp_path, names=(("a",), ("b",)), extra={"prefix_cost": 0.0}, env={"UCX_TLS": "tcp,self"}
    ) as pair:
        holder, reader = pair.engines["a"], pair.engines["b"]
        on_one_processor(holder)
        prompt = prompt_of(TOKENS, seed=1)
        expected = reader.submit(prompt, 4).result(120).token_ids
        assert holder.submit(prompt, 1).result(120).error == ""
        pair.settle()

        cached: list[int | None] = []
        while len(cached) < MOST_READS and not pair.counted("a", "prefixes.busy")["prefixes.busy"]:
            own = holder.submit(prompt_of(64, seed=10 + len(cached)), 100)
            while not own.done():
                wait_for(lambda: reset_prefix_cache(reader), 60.0)
                answered = reader.submit(prompt, 4).result(120)
                assert (answered.error, answered.token_ids) == ("", expected)
                cached.append(answered.num_cached_tokens)
        assert TOKENS // BLOCK * BLOCK in cached, "what it had saved is enough for one"
        assert pair.counted("a", "prefixes.busy")["prefixes.busy"], f"all of {len(cached)} were let through"
        assert cached[-1] == 0

        # Without a request of its own it has time.
        wait_for(lambda: reset_prefix_cache(reader), 60.0)
        pair.settle()
        assert reader.submit(prompt, 4).result(120).num_cached_tokens == TOKENS // BLOCK * BLOCK
