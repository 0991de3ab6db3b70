"""Staged engines (`kvd.backends.staged`): blocks of this worker are copied to where its peers read them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from kvd.backends.contract import Backend, StagingBackend
from kvd.geometry.model import WorkerGeometry
from kvd.topology.blocks import BlockList
from kvd.topology.compile import compile_plan
from kvd.topology.descriptors import concatenate
from kvd.topology.plan import plan_worker
from kvd.topology.push import compile_chunk, plan_push
from kvd.worker.orders import StageOrder, block_lists
from kvd.worker.streams.event import StreamEvent

_LOOK_S = 50e-6


class Stager:
    """Copies blocks of this worker to where its peers read them."""

    def __init__(
        self,
        backend: StagingBackend,
        geometry: WorkerGeometry,
        record_event: Callable[[], StreamEvent | None],
    ) -> None:
        """``record_event`` gives what tells when the device has come as far as now, None where it is there already."""
        self._backend = backend
        self._record_event = record_event
        # What a worker would read of itself is every byte that a peer may read of it.
        self._plan = plan_worker(geometry, (geometry,), (geometry,))
        self._layers = plan_push(geometry, (geometry,), (geometry,), geometry.rank)

    def stage(self, orders: Sequence[StageOrder]) -> None:
        """Copy these prefills once the device has computed them, and return when they are there.

        Raises `BackendError` where the device fails: what peers would read is not what was computed.
        """
        if not orders:
            return
        ready = self._record_event()
        while ready is not None and not ready():
            time.sleep(_LOOK_S)
        for order in orders:
            blocks = block_lists(order.groups)
            found = compile_plan(self._plan, blocks, blocks, tokens=order.tokens)
            self._backend.stage(concatenate(list(found.values())))

    def stage_layers(
        self, blocks: Mapping[int, BlockList], layers: Mapping[str, tuple[int, int]], total: int
    ) -> None:
        """Copy what these layers hold of tokens from the first to the last number given, of ``total``; as `stage`.

        ``blocks`` are the request's by group. Raises `BackendError` or `TopologyError`.
        """
        parts = [
            compile_chunk(self._layers[name], blocks, blocks, total=total, first=first, last=last)
            for name, (first, last) in layers.items()
        ]
        self._backend.stage(concatenate([part for part in parts if len(part)]))


def stager(
    backend: Backend, geometry: WorkerGeometry, record_event: Callable[[], StreamEvent | None]
) -> Stager | None:
    """The stager of a worker whose peers read a copy of its memory; None where they read the memory itself."""
    return Stager(backend, geometry, record_event) if isinstance(backend, StagingBackend) else None
