"""The scheduler's part of checksums: whose KV is added up, when, and whether that is what is handed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvd.vllm.memory.groups import GroupFacts
from kvd.vllm.scheduler.completed_prefills import CompletedPrefills
from kvd.vllm.vllm_types import BlockTable, VllmRequest, VllmStep
from kvd.worker.orders import SumOrder, SumOrders
from kvd.worker.settings import ConnectorSettings


class Sampling:
    """Which prefills of one engine are added up. Touched by the scheduler's step only."""

    def __init__(
        self,
        settings: ConnectorSettings,
        groups: Sequence[GroupFacts],
        table: Callable[[str], BlockTable | None],
    ) -> None:
        """``table`` gives a request's block ids where a step's output does not."""
        self._settings = settings
        self._prefills = CompletedPrefills(groups, table)
        self._names: dict[str, str] = {}
        self._dropped: list[str] = []

    def begin(self, request: VllmRequest, name: str = "") -> None:
        """A request arrived that is to be prefilled here; ``name`` is its transfer id where it is pushed."""
        if self._settings.samples(name or request.request_id):
            self._names[request.request_id] = name or request.request_id
            self._prefills.begin(request)

    def knows(self, request_id: str) -> bool:
        """Whether a request is one of them."""
        return request_id in self._names

    def take(self, output: VllmStep | None) -> SumOrders:
        """Prompts that the coming step computes to their end, and names of those that nobody will ask for."""
        if not self._names and not self._dropped:
            return SumOrders()
        orders = [SumOrder(self._names[found.request_id], *found) for found in self._prefills.take(output)]
        dropped, self._dropped = self._dropped, []
        return SumOrders(orders, dropped)

    def finished(self, request_id: str, table: BlockTable, *, completed: bool) -> bool:
        """A request ended with these blocks. Whether their sums are those that were made."""
        name = self._names.pop(request_id, None)
        if name is None:
            return False
        same = self._prefills.finished(request_id, table) and completed
        if not same:
            self._dropped.append(name)
        return same
