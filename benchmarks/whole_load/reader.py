"""The process that loads: the thread of a decoding worker, and what each part of a load took.

python3 -m benchmarks.whole_load.reader SOCKET DEVICE BYTES
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.whole_load.cache import Cache, Memory, clear, memory_of
from benchmarks.whole_load.child import serve
from benchmarks.whole_load.plain import from_peer, through_host
from kvd.backends.contract import Backend
from kvd.backends.registry import open_backend
from kvd.client.cards import CardReader
from kvd.geometry.model import EngineGeometry
from kvd.geometry.rank import Rank
from kvd.topology.transfer_topology import TransferTopology
from kvd.wire.card_parts import ToldCard
from kvd.wire.identity import EngineCard, EngineFacts, WorkerCard
from kvd.worker.load import Load, load_of
from kvd.worker.orders import LoadOrder
from kvd.worker.peers.followed import register
from kvd.worker.pull.reader import PullThread
from kvd.worker.remote import RemotePrefill

SETTLE = 60.0
"""Seconds in which a lane must have come to rest, and in which a load must end."""
BUSY_US, IDLE_US = 200, 20
"""How the interpreter is kept busy, as by an engine's step: Python without a pause, then a call that lets go of it."""


@dataclass
class Opened:
    """A way of reading: the backend, its thread, where loads end."""

    backend: Backend
    cache: Cache
    thread: PullThread
    ended: queue.Queue[Load]


class Reader:
    """Memory, and a backend over it for each way that is measured."""

    def __init__(self, device: str, size: int) -> None:
        self.words = memory_of(device, size)
        clear(self.words)
        self.opened: dict[str, Opened] = {}

    def open(
        self,
        name: str,
        kind: str,
        options: dict[str, Any],
        memory: Memory,
        block: int,
        geometry: bytes,
        metadata: bytes,
    ) -> dict[str, float]:
        """Register the memory and get to know the peer: seconds that each took."""
        began = time.perf_counter()
        cache = Cache(self.words, block, memory)
        backend = open_backend(kind, "d", options)
        backend.register(cache.geometry.regions)
        registered = time.perf_counter()
        facts = EngineFacts(engine_id=name, model="m")
        worker = WorkerCard(
            engine=facts,
            rank=Rank(0),
            incarnation="i",
            pid=os.getpid(),
            host="h",
            backend=kind,
            geometry=geometry,
            metadata=metadata,
        )
        ended: queue.Queue[Load] = queue.Queue()
        topology = TransferTopology(EngineGeometry("d", "", "m", 1, 1, 1, (cache.geometry,)), Rank())
        thread = PullThread(name, backend, topology, ended.put)
        register(
            topology, ToldCard(EngineCard(engine=facts, generation="g", workers=(worker,))), CardReader()
        )
        thread.on_peer_changed()
        until = time.monotonic() + SETTLE
        while (thread.lanes.now is None or thread._activity.now) and time.monotonic() < until:  # noqa: SLF001 - it tells nobody else
            time.sleep(0.01)
        if thread.lanes.now is None:
            raise RuntimeError("there is no lane to the peer")
        self.opened[name] = Opened(backend, cache, thread, ended)
        connected = time.perf_counter()
        # What a staged lane has mapped of a peer on its host is read by the device a while later, or never.
        peers = getattr(thread.lanes.now, "_peers", {}).values()
        near = [peer.near for peer in peers if getattr(peer, "near", None) is not None]
        for registering in [one._pins._thread for one in near]:  # noqa: SLF001
            if registering is not None:
                registering.join(max(0.0, until - time.monotonic()))
        return {
            "register_s": registered - began,
            "connect_s": connected - registered,
            "ready_s": time.perf_counter() - connected,
            "mapped": float(sum(one.ready for one in near)),
        }

    def load(
        self, name: str, mine: list[int], theirs: list[int], times: int, *, busy: bool = False
    ) -> list[dict[str, float]]:
        """Load these blocks so many times: microseconds of each part, for each time."""
        with _Busy(busy):
            return [self._one(self.opened[name], name, mine, theirs) for _ in range(times)]

    def check(self, name: str, mine: list[int], theirs: list[int]) -> int:
        """Load these blocks onto cleared memory: how many words of all are wrong then."""
        opened = self.opened[name]
        clear(self.words)
        self._one(opened, name, mine, theirs)
        return opened.cache.wrong(mine, theirs)

    def plain(self, name: str, size: int, times: int) -> list[dict[str, float]]:
        """The driver's copy of so many bytes out of the memory that a direct lane has mapped."""
        opened = self.opened[name]
        return from_peer(opened.thread.lanes.now, self.words, opened.cache.page, size, times)

    def through_host(self, size: int, times: int) -> list[dict[str, float]]:
        """Plain copies to pinned memory and back."""
        return through_host(self.words, size, times)

    def close(self, name: str) -> None:
        """Give a backend up."""
        opened = self.opened.pop(name, None)
        if opened is None:
            return
        opened.thread.stop()
        opened.thread.join(10.0)
        opened.backend.close()

    def _one(self, opened: Opened, name: str, mine: list[int], theirs: list[int]) -> dict[str, float]:
        tokens = len(mine) * opened.cache.block
        prefill = RemotePrefill(
            engine_id=name, request_id="r", generation="g", host="h", port=1, tokens=tokens,
            blocks=(tuple(theirs),), first_blocks=(0,), lease_seconds=60.0, lease_opened=0.0,
        )  # fmt: skip
        now = time.monotonic()
        order = LoadOrder("r", prefill, {0: (0, tuple(mine))}, tokens, SETTLE, now)
        began = time.monotonic()
        opened.thread.begin(load_of(order, began))
        load = opened.ended.get(timeout=SETTLE)
        told = time.monotonic()
        if load.cause is not None:
            raise RuntimeError(f"the load missed: {load.cause}")
        device = sum(transfer.detail.get("device_seconds", 0.0) for transfer in load.pieces.transfers)
        times = load.times
        parts = {
            "wake": times.planned - times.planning_seconds - began,
            "plan": times.planning_seconds,
            "hand_over": times.posting - times.planned,
            "post": times.posted - times.posting,
            "moving": times.ended - times.posted,
            "device": device,
            "report": told - times.ended,
            "whole": times.ended - began,
        }
        return {part: seconds * 1e6 for part, seconds in parts.items()} | {
            "transfers": float(len(load.pieces.transfers))
        }


class _Busy:
    """Another thread that runs Python meanwhile."""

    def __init__(self, on: bool) -> None:
        self._on = on
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        if self._on:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._on:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            until = time.perf_counter() + BUSY_US * 1e-6
            while time.perf_counter() < until:
                sum(range(50))
            time.sleep(IDLE_US * 1e-6)


def main() -> None:
    """Serve."""
    address, device, size = sys.argv[1:]
    if device != "cpu":
        torch.cuda.set_device(device)
    reader = Reader(device, int(size))
    answers = {
        name: getattr(reader, name) for name in ("open", "load", "check", "plain", "through_host", "close")
    }
    serve(address, {**answers, "ready": lambda: True})


if __name__ == "__main__":
    main()
