"""The engine's own metrics of transfers, ``vllm:kvd_*``: from the halves' tallies to its log and to Prometheus.

Names, units and buckets are those of ``vllm:nixl_*``, so that rules may give the one for the other
(configs/monitoring/nixl-names.yaml).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvd.worker.tally import TransferTally

_TIMES = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_HISTOGRAMS: dict[str, tuple[str, str, Sequence[float]]] = {
    "xfer_seconds": (
        "vllm:kvd_xfer_time_seconds",
        "Time from the first post of a KV transfer to its last byte; of a push from its first layer to its last.",
        _TIMES[1:],
    ),
    "post_seconds": ("vllm:kvd_post_time_seconds", "Time in which a pull's reads were posted.", _TIMES),
    "bytes": (
        "vllm:kvd_bytes_transferred",
        "Bytes of a KV transfer on one worker.",
        tuple(2**power for power in range(11, 35, 2)),
    ),
    "descriptors": (
        "vllm:kvd_num_descriptors",
        "Descriptors of a pull on one worker, as they were handed to the backend.",
        (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000),
    ),
}
_COUNTERS: dict[str, tuple[str, str]] = {
    "failed": (
        "vllm:kvd_num_failed_transfers",
        "KV transfers that missed, whatever the reason, but for requests that were over.",
    ),
    "expired": (
        "vllm:kvd_num_kv_expired_reqs",
        "Prefills whose KV no decoder fetched while it was kept. Counted by the prefiller.",
    ),
}


@dataclass
class KvdTransferStats(KVConnectorStats):
    """Observations of transfers, by name: lists for `_HISTOGRAMS`, numbers for `_COUNTERS`."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget all."""
        self.data = {**{name: [] for name in _HISTOGRAMS}, **dict.fromkeys(_COUNTERS, 0)}

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another worker's, or a later step's."""
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value
        return self

    def reduce(self) -> dict[str, Any]:
        """The line in the engine's log, in the words of stock's."""
        seconds, posts, sizes, descriptors = (np.asarray(self.data[name], float) for name in _HISTOGRAMS)
        megabytes = sizes / 2**20
        return {
            "Num successful transfers": len(seconds),
            "Avg xfer time (ms)": round(_mean(seconds) * 1e3, 3),
            "P90 xfer time (ms)": round(_ninetieth(seconds) * 1e3, 3),
            "Avg post time (ms)": round(_mean(posts) * 1e3, 3),
            "P90 post time (ms)": round(_ninetieth(posts) * 1e3, 3),
            "Avg MB per transfer": round(_mean(megabytes), 3),
            "Throughput (MB/s)": round(float(megabytes.sum() / seconds.sum()) if seconds.any() else 0.0, 3),
            "Avg number of descriptors": round(_mean(descriptors), 1),
            "Num failed transfers": self.data["failed"],
            "Num KV expired reqs": self.data["expired"],
        }


class KvdPromMetrics(KVConnectorPromMetrics):
    """The same for Prometheus, in the API server's process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def by_engine(metric: Any) -> dict[int, Any]:
            return {engine: metric.labels(*values) for engine, values in per_engine_labelvalues.items()}

        self._histograms = {
            key: by_engine(
                self._histogram_cls(
                    name=name, documentation=says, buckets=list(buckets), labelnames=labelnames
                )
            )
            for key, (name, says, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            key: by_engine(self._counter_cls(name=name, documentation=says, labelnames=labelnames))
            for key, (name, says) in _COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """One step's observations of one engine."""
        for key, histogram in self._histograms.items():
            for value in transfer_stats_data[key]:
                histogram[engine_idx].observe(value)
        for key, counter in self._counters.items():
            counter[engine_idx].inc(transfer_stats_data[key])


def transfer_stats(tally: TransferTally) -> KvdTransferStats | None:
    """What a half counted since the last step; None where that is nothing."""
    counted = tally.take()
    if counted is None:
        return None
    return KvdTransferStats(
        {
            "xfer_seconds": [moved.seconds for moved in counted.moved],
            "post_seconds": [moved.post_seconds for moved in counted.moved if moved.post_seconds is not None],
            "bytes": [moved.nbytes for moved in counted.moved],
            "descriptors": [moved.descriptors for moved in counted.moved if moved.descriptors is not None],
            "failed": counted.failed,
            "expired": counted.expired,
        }
    )


def _mean(values: np.ndarray[Any, Any]) -> float:
    return float(values.mean()) if len(values) else 0.0


def _ninetieth(values: np.ndarray[Any, Any]) -> float:
    return float(np.percentile(values, 90)) if len(values) else 0.0
