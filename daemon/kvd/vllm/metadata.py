"""What vLLM carries between the two halves of a connector with each step."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvd.worker.orders import StepOrders, StepOutcomes


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """A step's orders, to the workers."""

    orders: StepOrders


@dataclass(slots=True)
class WorkerMetadata(KVConnectorWorkerMetadata):
    """What became of loads, to the scheduler."""

    outcomes: StepOutcomes

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Of two workers."""
        return (
            WorkerMetadata(self.outcomes.merge(other.outcomes)) if isinstance(other, WorkerMetadata) else self
        )
