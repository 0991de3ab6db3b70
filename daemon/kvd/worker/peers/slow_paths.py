"""How fast the bytes of each peer came, and a warning where a path between GPUs is not one that was meant for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from kvd.backends.registry import mover
from kvd.shown import logger
from kvd.topology.findings import Finding
from kvd.topology.rate import Pace, Probed, slow_path, slow_probe
from kvd.topology.transfer_topology import RemoteEngine
from kvd.wire.transfer import TransferRecord

log = logger(__name__)

REMEMBERED = 4
"""Transfers of a peer that are looked at together."""


class Paths:
    """The last transfers from each peer engine. Called on the threads on which loads end."""

    def __init__(self, device: str) -> None:
        """``device`` is where the worker's memory is; nothing is remembered on a host."""
        self._device = device
        self._lock = threading.Lock()
        self._paces: dict[str, deque[Pace]] = {}
        self._told: set[str] = set()

    def note(self, record: TransferRecord) -> None:
        """A load has ended: warn, once for each generation of a peer, if its bytes come through the host."""
        if self._device == "cpu" or record.state != "done" or record.mode != "pull":
            return
        peer = f"{record.remote_engine} {record.remote_generation}"
        with self._lock:
            if peer in self._told:
                return
            paces = self._paces.setdefault(peer, deque(maxlen=REMEMBERED))
            seconds = record.stages.get("post", 0.0) + record.stages.get("wire", 0.0)
            paces.append(Pace(record.bytes, seconds, record.coalesced_descriptors))
            found = slow_path(paces, (self._device,), mover(record.backend))
        self._tell(record.remote_engine, record.remote_generation, found)

    def probed(self, peer: RemoteEngine, backend: str, results: Iterable[Probed]) -> None:
        """A probe has ended: the same warning, ahead of the first load."""
        self._tell(peer.engine_id, peer.generation, slow_probe(results, peer.devices, mover(backend)))

    def _tell(self, engine_id: str, generation: str, found: Finding | None) -> None:
        if found is None:
            return
        with self._lock:
            if f"{engine_id} {generation}" in self._told:
                return
            self._told.add(f"{engine_id} {generation}")
        log.warning("%s: KV of %s: %s; %s", found.code, engine_id, found.message, found.hint)
