"""A prefilling and a decoding worker in one process: real geometry and plans, the memory backend, scripted faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvd.backends.contract import Operation, State, Transfer
from kvd.backends.memory import Faults, MemoryBackend, MemoryLane, open_backend
from kvd.topology.descriptors import Descriptors
from kvd.vllm.memory.tensors import sibling_geometries, worker_geometry
from kvd.wire.transfer import ReportTransfers, TransferRecord
from kvd.worker.cause import text_of
from kvd.worker.in_step import StreamOf
from kvd.worker.orders import LoadOrder, StepOrders
from kvd.worker.reporting import Results
from kvd.worker.settings import ConnectorSettings
from kvd.worker.worker import WorkerHalf
from tests.support.rigs.bench import (
    BF16,
    Script,
    Tensor,
    cache_config,
    dense,
    eventually,
    facts,
    full,
    groups_of,
    place,
)

BLOCKS = 16
ELEMENTS = 2 * 4 * 8
"""Of one block of one layer: 2 heads x 4 tokens x (4 + 4)."""

Buffer = np.ndarray[tuple[int], np.dtype[np.uint16]]


class SlowLane:
    """A lane whose calls can be made to hang, and whose destruction can be made to fail."""

    def __init__(self, inner: MemoryLane, gates: Gates) -> None:
        self._inner, self._gates = inner, gates

    def add(self, peer: str, metadata: bytes) -> None:
        self._gates.pass_("add")
        self._inner.add(peer, metadata)

    def submit(self, peer: str, descriptors: Descriptors, operation: Operation = "read") -> Transfer:
        self._gates.pass_("submit")
        return self._inner.submit(peer, descriptors, operation)

    def poll(self, transfer: Transfer) -> State:
        self._gates.pass_("poll")
        return self._inner.poll(transfer)

    def precede(self, transfer: Transfer, stream: int) -> None:
        self._gates.streams.append(stream)
        self._inner.precede(transfer, stream)

    def close(self) -> None:
        self._gates.pass_("close")
        if self._gates.close_errors:
            self._gates.close_tried.set()
            raise self._gates.close_errors[0]
        self._inner.close()
        self._gates.closed += 1


@dataclass
class Gates:
    """Which calls hang (until their event is set) and which fail."""

    hang: dict[str, threading.Event] = field(default_factory=dict)
    reached: dict[str, threading.Event] = field(default_factory=dict)
    close_errors: list[Exception] = field(default_factory=list)
    close_tried: threading.Event = field(default_factory=threading.Event)
    streams: list[int] = field(default_factory=list)
    """Those that were put behind transfers."""
    opened: int = 0
    closed: int = 0

    def stop(self, call: str) -> tuple[threading.Event, threading.Event]:
        """From now on ``call`` hangs: (set it to let it go on, wait for it to be reached)."""
        self.hang[call], self.reached[call] = threading.Event(), threading.Event()
        return self.hang[call], self.reached[call]

    def pass_(self, call: str) -> None:
        if call in self.hang:
            self.reached[call].set()
            assert self.hang[call].wait(30)


class SlowBackend:
    """A memory backend whose lanes pass the gates."""

    def __init__(self, inner: MemoryBackend, gates: Gates) -> None:
        self._inner, self._gates = inner, gates
        self.name, self.traits, self.closed = inner.name, inner.traits, False

    def register(self, regions: Any) -> None:
        self._inner.register(regions)

    def metadata(self) -> bytes:
        return self._inner.metadata()

    def lane(self, name: str) -> SlowLane:
        self._gates.opened += 1
        return SlowLane(self._inner.lane(name), self._gates)

    def close(self) -> None:
        self.closed = True
        self._inner.close()


def memory(layers: int) -> tuple[Buffer, dict[str, Tensor]]:
    """One buffer, layer after layer, each (block, head, token, key + value)."""
    buffer: Buffer = np.zeros(layers * BLOCKS * ELEMENTS, np.uint16)
    shape = (BLOCKS, 2, 4, 8)
    tensors = {
        f"l{n}": Tensor(buffer, BF16, shape, dense(shape), n * BLOCKS * ELEMENTS * 2) for n in range(layers)
    }
    return buffer, tensors


def gather(worker: WorkerHalf, count: int) -> Results:
    """The results of ``count`` loads, as vLLM's steps would gather them."""
    gathered = Results()

    def look() -> bool:
        step = worker.results()
        gathered.received |= step.received
        gathered.failed |= step.failed
        gathered.bad_blocks |= step.bad_blocks
        return len(gathered.received) >= count

    eventually(look)
    return gathered


class Rig:
    """Engine ``p`` has written its blocks; engine ``d`` reads them."""

    def __init__(
        self,
        config: SimpleNamespace | None = None,
        settings: ConnectorSettings | None = None,
        stream_of: StreamOf | None = None,
    ) -> None:
        """With ``stream_of`` the decoder's memory has streams, so that a step can run behind its loads."""
        self.stream_of = stream_of
        self.config = config or cache_config(BLOCKS, (full(), ("l0", "l1")))
        self.faults, self.gates = Faults(), Gates()
        self.source, self.prefiller, self.p_script = self._worker("p", Faults(), Gates(), settings)
        self.target, self.decoder, self.script = self._worker("d", self.faults, self.gates, settings)
        self.source[:] = np.arange(len(self.source)) % 65535 + 1
        self.backend: Any = self.decoder._backend

    def _worker(
        self, name: str, faults: Faults, gates: Gates, settings: ConnectorSettings | None
    ) -> tuple[Buffer, WorkerHalf, Script]:
        buffer, tensors = memory(2)
        groups = groups_of(self.config)
        script = Script()
        half = WorkerHalf(
            settings or ConnectorSettings(backend="memory", probe=False),
            facts(name, len(groups)),
            worker_geometry(tensors, self.config, groups, place()),
            sibling_geometries(tensors, self.config, groups, place()),
            SlowBackend(open_backend(name, options={"faults": faults}), gates),
            script.open,
            memory=tensors,
            stream_of=self.stream_of if name == "d" else None,
        )
        return buffer, half, script

    @property
    def card(self) -> Any:
        """The prefilling worker's card."""
        return self.p_script.card().card

    def start(self, *orders: LoadOrder) -> None:
        self.decoder.start(StepOrders(loads=list(orders)))

    def results(self, count: int = 1) -> Results:
        """The results of ``count`` loads, as vLLM's steps would gather them."""
        return gather(self.decoder, count)

    def asleep(self) -> None:
        """The lane is there, and its thread waits for a word: a step posts its loads itself."""
        thread = eventually(lambda: self.decoder._peers.pull_threads.get("p"))
        assert thread is not None
        eventually(lambda: thread.lanes.now)
        waits: Any = thread._thread._inbox.not_empty
        eventually(lambda: thread._thread.idle and waits._waiters)

    def expire(self, request_id: str = "d-1", pieces: int = 0) -> None:
        """The time of a load is up, once it is posted and so many of its pieces have come."""
        load = self.decoder.loads.begun[request_id]
        eventually(lambda: load.times.posted and load.pieces.done >= pieces)
        load.deadline = time.monotonic()

    def causes(self) -> dict[str, str]:
        """Causes by request of what `results` gave last."""
        outcomes = self.decoder.outcomes()
        return {name: text_of(cause) for name, cause in outcomes.loads.items()} if outcomes else {}

    def records(self) -> list[TransferRecord]:
        return [r for told in self.script.told(ReportTransfers) for r in told.records]

    def blocks(self, buffer: Buffer, layer: int, *ids: int) -> Any:
        """Contents of blocks of a layer, shape (blocks, elements)."""
        return buffer.reshape(2, BLOCKS, ELEMENTS)[layer, list(ids)]

    def same(self, local: tuple[int, ...], remote: tuple[int, ...]) -> bool:
        """Whether those blocks have arrived, in all layers."""
        return all(
            bool((self.blocks(self.target, n, *local) == self.blocks(self.source, n, *remote)).all())
            for n in range(2)
        )

    def untouched(self, *ids: int) -> bool:
        """Whether nothing was written into those blocks."""
        return not any(self.blocks(self.target, n, *ids).any() for n in range(2))

    def close(self) -> None:
        for event in self.gates.hang.values():
            event.set()
        self.gates.close_errors.clear()
        self.decoder.close()
        self.prefiller.close()


Open = Callable[..., Rig]
