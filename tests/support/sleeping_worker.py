"""A worker whose KV memory goes and comes back as a GPU's does in vLLM's sleep mode.

vLLM's CPU build takes `sleep`: its scheduler ends all requests and forgets its cache. Its worker keeps the memory, and
says so. What vLLM 0.33's GPU worker does then is done here: it tells the connector, and then the memory holds nothing.
Engines get it by ``worker_extension_cls``.
"""

from __future__ import annotations

from typing import Any

from kvctl.demo.engine import EngineProcess
from tests.support.engine_calls import ask_workers

EXTENSION = f"{__name__}.SleepingWorker"


class SleepingWorker:
    """What vLLM makes a base of its worker class."""

    model_runner: Any

    def lose_memory(self) -> None:
        """The connector hears of it first."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        get_kv_transfer_group().unregister_kv_caches()
        for cache in self.model_runner.kv_caches:
            cache.fill_(float("nan"))

    def have_memory(self) -> None:
        """It is there again, with nothing in it."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        for cache in self.model_runner.kv_caches:
            cache.zero_()
        get_kv_transfer_group().restore_kv_caches()


def put_to_sleep(engine: EngineProcess) -> None:
    """Have an engine go to sleep, whatever it is doing."""
    engine.call(f"{__name__}:_sleep").result(60)
    ask_workers(engine, "lose_memory")


def wake(engine: EngineProcess) -> None:
    """Have it go on."""
    ask_workers(engine, "have_memory")
    engine.call(f"{__name__}:_wake").result(60)


async def _sleep(engine: Any) -> None:
    await engine.sleep(level=1)


async def _wake(engine: Any) -> None:
    await engine.wake_up()
