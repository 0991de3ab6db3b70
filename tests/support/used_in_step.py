"""Which loads a decoder used in the very step that ordered them: neither its ledger nor its log says so of good ones.

And requests that it schedules together though they come one after the other, and a step that takes long.

Added to vLLM's worker, inside the engine's processes (``worker_extension_cls``).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvd.worker.in_step import InStepLoads

if TYPE_CHECKING:
    from kvd.worker.load import Load

_used: list[str] = []
_slow: list[float] = []
_begun, _join = InStepLoads.begun, InStepLoads.join


def _noted(self: InStepLoads, load: Load) -> None:
    _used.append(load.order.request_id)
    _begun(self, load)


def _joined(self: InStepLoads) -> None:
    loads = bool(self._begun)
    _join(self)
    if loads and _slow:
        time.sleep(_slow.pop())


InStepLoads.begun, InStepLoads.join = _noted, _joined  # type: ignore[method-assign]


class UsedInStep:
    """What is asked with `tests.support.engine_calls.ask_workers`."""

    def used_in_step(self) -> list[str]:
        """The requests of those loads so far, misses too."""
        return list(_used)

    def pause(self, seconds: float) -> None:
        """Take the time of the engine's loop: what comes meanwhile is scheduled together."""
        time.sleep(seconds)

    def slow(self, seconds: float) -> None:
        """Have the next step that uses loads take so much longer."""
        _slow.append(seconds)


async def paused(engine: Any, seconds: float) -> None:
    """The same for `kvctl.demo.engine.EngineProcess.call`."""
    await engine.collective_rpc("pause", args=(seconds,))
