"""An engine's only worker whose loads can be used in the step that orders them, beside vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvd.worker.cause import Cause
from kvd.worker.orders import ClaimAnswer, LoadOrder, StepOrders, StepOutcomes
from kvd.worker.remote import RemotePrefill
from tests.support.rigs.bench import facts
from tests.support.rigs.stepped import OURS, PREFILLER, SteppedScheduler, WillingKvd

LOST = Cause("the peer is gone", "TRANSFER_FAILED")


class InStepWorker:
    """An engine's only worker, whose loads can be used in their step; all come, but for those that are to ``miss``."""

    def __init__(self) -> None:
        self.in_step = self.loads = self
        self.begun: list[LoadOrder] = []
        self.miss: set[str] = set()
        self.longest = 1.0
        """Seconds that any load takes."""
        self.dropped: list[str] = []
        self.gone: list[str] = []
        self.over: set[str] = set()
        """Loads that have ended, and are told of when somebody asks what has."""
        self._told: set[str] = set()

    # --- as early.py has it ---

    @property
    def expects(self) -> bool:
        return bool(self.begun)

    def begin_ahead(self, orders: StepOrders, _wait: float) -> bool:
        loads, orders.loads, orders.answered, orders.dropped = orders.loads, [], [], []
        self.begun += loads
        return bool(loads)

    def complete(self, _wait: float = 0.0) -> tuple[set[str], StepOutcomes]:
        return set(), StepOutcomes()

    def complete_soon(self, *, idle: bool) -> tuple[set[str], StepOutcomes]:  # noqa: ARG002 - as the worker has it
        return set(), StepOutcomes()

    # --- as in_step.py has it ---

    def takes(self, _prefill: RemotePrefill, _tokens: int, most_seconds: float) -> bool:
        return self.longest <= most_seconds

    def stands(self, request_id: str) -> bool:
        return request_id not in self.miss | self._told

    def ended(self, _wait: float) -> StepOutcomes:
        ended = {one.request_id for one in self.begun} & ((self.miss | self.over) - self._told)
        self._told |= ended
        causes = {name: LOST if name in self.miss else None for name in ended}
        return StepOutcomes(causes, dict.fromkeys(ended, 1.0))

    def let_go(self, request_id: str) -> None:
        self.gone.append(request_id)

    def answered(self, answers: Iterable[ClaimAnswer]) -> None:
        self.miss |= {answer.request_id for answer in answers if answer.refused}

    def drop(self, request_id: str) -> None:
        self.dropped.append(request_id)

    def orders(self, request_id: str) -> list[LoadOrder]:
        return [order for order in self.begun if order.request_id == request_id]


Open = Callable[..., SteppedScheduler]


def present() -> InStepWorker:
    """One in this process, that is all of its engine; its loads are short."""
    from kvd.vllm import early  # which imports vLLM

    here = InStepWorker()
    here.longest = 1e-3
    early.present(facts("d"), here)  # type: ignore[arg-type]
    return here


@contextmanager
def opening(model: Path, kvd: WillingKvd, block: int) -> Iterator[Open]:
    """Opens schedulers whose worker is `present`."""
    made: list[SteppedScheduler] = []

    from kvd.vllm.early import schedule_early

    def open_(more: dict[str, Any] | None = None, policy: str = "recompute") -> SteppedScheduler:
        connector = {**OURS, "kv_load_failure_policy": policy, "kv_connector_extra_config": more or {}}
        made.append(SteppedScheduler(model, connector, block=block, ahead=True, choose=schedule_early))
        kvd.push(PREFILLER)
        return made[-1]

    yield open_
    for bench in made:
        bench.scheduler.shutdown()


def free_blocks(bench: SteppedScheduler) -> int:
    return int(bench.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def tokens_of(bench: SteppedScheduler, request_id: str) -> list[int]:
    """What the last step's results gave to a request."""
    return [token for one in bench.outputs if one.request_id == request_id for token in one.new_token_ids]
