"""How fast each peer's bytes came, and a warning where a path between GPUs is not one that was meant for them."""

from __future__ import annotations

import logging
import threading
from collections import deque

from kvd.topology.pace import Pace, slow_path
from kvd.wire.transfer import TransferRecord

log = logging.getLogger(__name__)

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
            found = slow_path(paces, (self._device,), record.backend)
            if found is None:
                return
            self._told.add(peer)
        log.warning("%s: KV of %s: %s; %s", found.code, record.remote_engine, found.message, found.hint)
