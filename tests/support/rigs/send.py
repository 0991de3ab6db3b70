"""Prefilling workers that really write, and a decoder that the test speaks for: any pair of engines, no kvd.

The memory of both engines is real, and the oracle of the topology tests says what belongs where.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from kvd.backends.memory import Faults, MemoryBackend, open_backend
from kvd.client.errors import ClientError
from kvd.geometry.codec import encode_worker
from kvd.geometry.model import EngineGeometry, Region, WorkerGeometry
from kvd.topology.blocks import BlockList
from kvd.topology.compile import compile_plan
from kvd.topology.leftover import leftover
from kvd.topology.plan import plan_worker
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer, PeerGone, PeerReady
from kvd.wire.identity import Endpoint, EngineCard, EngineFacts, WorkerCard
from kvd.wire.push import BlockRun, PushAnnounce, PushDone, PushKept, PushKey, PushProgress, PushWithdraw
from kvd.wire.reply import Ok
from kvd.worker.orders import PushEnd, PushStep, StepOrders
from kvd.worker.settings import ConnectorSettings
from kvd.worker.worker import WorkerHalf
from tests.support import oracle
from tests.support.rigs.bench import GENERATION, Asked, Script, eventually, why
from tests.support.rigs.pull import Gates, SlowBackend

DECODER_GENERATION = "d-gen"


def placed(engine: EngineGeometry) -> tuple[EngineGeometry, tuple[oracle.Memory, ...]]:
    """The same engine with its regions in real memory."""
    workers, memories = [], []
    for worker in engine.workers:
        arrays = tuple(np.full(r.length, oracle.UNTOUCHED, np.uint8) for r in worker.regions)
        regions = tuple(Region(int(a.ctypes.data), len(a)) for a in arrays)
        here = replace(worker, regions=regions)
        workers.append(here)
        memories.append(oracle.Memory(here, arrays))
    return replace(engine, workers=tuple(workers)), tuple(memories)


class Wire(Script):
    """A session whose kvd answers by itself: it knows the decoder, and takes whatever is delivered."""

    card_of_decoder: EngineCard
    refuse: ClientError | None = None
    lost = False

    def call(self, message: Message, timeout: float) -> Future[Message]:
        future = super().call(message, timeout)
        if isinstance(message, GetPeer) and self.refuse is not None:
            future.set_exception(self.refuse)
        elif isinstance(message, GetPeer):
            future.set_result(PeerReady(local_engine="p", peer=self.card_of_decoder))
        return future

    def deliver(
        self, key: str, message: Any, keep_seconds: float = 600.0, *, after: float = 0.0
    ) -> Future[Message]:
        future = super().deliver(key, message, keep_seconds, after=after)
        if not self.lost and isinstance(self.delivered[-1].message, PushProgress):
            future.set_result(Ok())
        return future


@dataclass
class Prefiller:
    """One prefilling worker."""

    half: WorkerHalf
    wire: Wire
    faults: Faults
    gates: Gates
    memory: oracle.Memory
    sent: set[str] = field(default_factory=set)


class SendRig:
    """Engine ``p`` pushes to engine ``d``, of which only the memory and the card exist."""

    def __init__(self, p: EngineGeometry, d: EngineGeometry, **settings: Any) -> None:
        self.p, memories = placed(p)
        self.d, self.targets = placed(d)
        self.backends = [self._backend(worker) for worker in self.d.workers]
        self.card = EngineCard(
            engine=self._facts("d", self.d),
            generation=DECODER_GENERATION,
            workers=tuple(
                WorkerCard(
                    engine=self._facts("d", self.d), rank=w.rank, incarnation="i", pid=1, host="h",
                    backend="memory", geometry=encode_worker(w), metadata=backend.metadata(),
                )
                for w, backend in zip(self.d.workers, self.backends, strict=True)
            ),
        )  # fmt: skip
        self.settings = ConnectorSettings(backend="memory", mode="push", **settings)
        self.workers = [self._worker(w, memory) for w, memory in zip(self.p.workers, memories, strict=True)]
        self.marks = itertools.count()
        self.digest = ""  # of the decoder's prompt

    def decoder_exports(self, worker: int, metadata: bytes) -> None:
        """From now on the decoder's card says that its worker of that number exported ``metadata``."""
        cards = list(self.card.workers)
        cards[worker] = msgspec.structs.replace(cards[worker], metadata=metadata)
        self.card = msgspec.structs.replace(self.card, workers=tuple(cards))
        for one in self.workers:
            one.wire.card_of_decoder = self.card

    @staticmethod
    def _facts(name: str, engine: EngineGeometry) -> EngineFacts:
        return EngineFacts(
            engine_id=name, model="m", tp=engine.tp, pp=engine.pp, dcp=engine.dcp,
            groups=len(engine.workers[0].groups), world_size=len(engine.workers),
        )  # fmt: skip

    @staticmethod
    def _backend(worker: WorkerGeometry) -> MemoryBackend:
        backend = open_backend(f"d-{worker.rank}", options={})
        backend.register(worker.regions)
        return backend

    def _worker(self, worker: WorkerGeometry, memory: oracle.Memory) -> Prefiller:
        faults, gates, wire = Faults(), Gates(), Wire()
        wire.card_of_decoder = self.card
        half = WorkerHalf(
            self.settings,
            self._facts("p", self.p),
            worker,
            self.p.workers,
            SlowBackend(open_backend(f"p-{worker.rank}", options={"faults": faults}), gates),
            wire.open,
            memory=memory,
        )
        return Prefiller(half, wire, faults, gates, memory)

    # --- what the decoder says ---

    def key(self, worker: int = 0, name: str = "x", attempt: int = 0) -> PushKey:
        return PushKey(
            transfer_id=name, prefiller="p", prefiller_endpoint=Endpoint("p", 1), decoder="d",
            rank=self.d.workers[worker].rank, attempt=attempt, decoder_endpoint=Endpoint("d", 2),
        )  # fmt: skip

    def announce(
        self,
        blocks: Mapping[int, BlockList],
        tokens: int,
        *,
        worker: int = 0,
        name: str = "x",
        attempt: int = 0,
        window: bytes | None = None,
        seconds: float = 60.0,
        generations: tuple[str, str] = (GENERATION, DECODER_GENERATION),
    ) -> list[Any]:
        message = PushAnnounce(
            key=self.key(worker, name, attempt),
            generations=generations,
            tokens=tokens,
            computed=0,
            blocks=tuple(BlockRun(g, b.first, tuple(b.ids.tolist())) for g, b in blocks.items()),
            window=self.backends[worker].metadata() if window is None else window,
            seconds=seconds,
            digest=self.digest,
        )
        return self.send(message)

    def withdraw(self, *, worker: int = 0, name: str = "x", attempt: int = 0) -> None:
        self.send(PushWithdraw(key=self.key(worker, name, attempt)))

    def done(self, *, worker: int = 0, name: str = "x") -> None:
        self.send(PushDone(key=self.key(worker, name)))

    def send(self, message: Message) -> list[Any]:
        """To all workers; what they answer."""
        return [w.wire.push(message) for w in self.workers]

    def decoder_gone(self) -> None:
        self.send(PeerGone(engine_id="d", generation=DECODER_GENERATION, reason="killed"))

    # --- what vLLM does ---

    def begin(self, *steps: PushStep) -> None:
        for worker in self.workers:
            worker.half.pushing.begin(StepOrders(pushes=list(steps)))

    def hook(self, layer: str) -> None:
        for worker in self.workers:
            if layer in worker.half.geometry.layers:
                worker.half.pushing.saved(layer)

    def stepped(self) -> None:
        for worker in self.workers:
            worker.half.pushing.stepped()

    def run(self, step: PushStep, layers: Iterable[str] = ()) -> None:
        """One whole step; ``layers`` have a hook, in that order."""
        self.begin(step)
        for layer in layers:
            self.hook(layer)
        self.stepped()

    def end(self, name: str = "x", request_id: str = "r", *, seconds: float = 60.0, cause: str = "") -> None:
        for worker in self.workers:
            end = PushEnd(name, request_id, seconds, why(cause) if cause else None)
            worker.half.pushing.begin(StepOrders(push_ends=[end]))

    def keep(self, name: str = "x", request_id: str = "r") -> None:
        """The scheduler's word, by way of kvd, that a request is complete and its blocks stay."""
        for worker in self.workers:
            worker.wire.push(PushKept(engine_id="p", transfer_id=name, request_id=request_id))

    def fill(self, blocks: Mapping[int, BlockList]) -> None:
        """The KV of the prompt, in these blocks of the prefiller."""
        for worker in self.workers:
            oracle.fill(worker.memory, blocks)

    # --- what comes of it ---

    def progress(self, *, prefiller: int = 0, worker: int = 0, name: str = "x") -> list[PushProgress]:
        """What one prefilling worker told one decoding one of a transfer."""
        rank = self.d.workers[worker].rank
        told = self.workers[prefiller].wire.told(PushProgress)
        return [p for p in told if p.key.transfer_id == name and p.key.rank == rank]

    def there(self, **whose: Any) -> set[tuple[str, int]]:
        """(layer, tokens) of everything told."""
        return {
            (layer, part.tokens) for p in self.progress(**whose) for part in p.there for layer in part.layers
        }

    def failures(self, **whose: Any) -> list[str]:
        return [p.failed for p in self.progress(**whose) if p.failed]

    def quiesced(self, **whose: Any) -> bool:
        return any(p.quiesced for p in self.progress(**whose))

    def sent(self) -> list[set[str]]:
        """Requests that each worker reported so far; each request once."""
        for worker in self.workers:
            new = worker.half.results().sent
            assert not new & worker.sent
            worker.sent |= new
        return [set(worker.sent) for worker in self.workers]

    def all_sent(self, *requests: str) -> bool:
        return all(found == set(requests) for found in self.sent())

    def expected(
        self, request: oracle.Request, worker: int = 0, *, decoder: bool = False
    ) -> tuple[oracle.Bytes, ...]:
        """The memory of a decoding worker as pull would leave it: a ``decoder`` zeroes what is not written."""
        local = self.d.workers[worker]
        mine = oracle.memory(local)
        plan = plan_worker(local, self.d.workers, self.p.workers)
        compiled = compile_plan(plan, request.local, request.remote, tokens=request.tokens)
        for position, rows in compiled.items():
            written = tuple(np.zeros(len(r), np.int64) for r in mine.regions)
            oracle._copy(rows, mine, self.workers[position].memory, written)
        if decoder:
            blocks, tokens = (request.local, request.remote), request.tokens
            runs = leftover(plan, *blocks, tokens=tokens, computed=request.computed)
            oracle.clear(runs, mine, tuple(np.zeros(len(r), np.int64) for r in mine.regions))
        return mine.regions

    def as_pulled(self, request: oracle.Request, worker: int = 0, *, decoder: bool = False) -> bool:
        found, right = self.targets[worker].regions, self.expected(request, worker, decoder=decoder)
        return all(bool((mine == theirs).all()) for mine, theirs in zip(found, right, strict=True))

    def close(self) -> None:
        for worker in self.workers:
            for event in worker.gates.hang.values():
                event.set()
            worker.gates.close_errors.clear()
            worker.half.close()


@contextmanager
def sending(p: EngineGeometry, d: EngineGeometry, **settings: Any) -> Iterator[SendRig]:
    rig = SendRig(p, d, **settings)
    try:
        yield rig
    finally:
        rig.close()


def step(
    blocks: Mapping[int, BlockList],
    reached: int,
    total: int,
    *,
    held: int = 0,
    again: bool = False,
    name: str = "x",
    request_id: str = "r",
    digest: str = "",
) -> PushStep:
    groups = {g: (b.first, tuple(b.ids.tolist())) for g, b in blocks.items()}
    return PushStep(name, request_id, groups, reached, total, again, held, digest=digest)


__all__ = ["Asked", "SendRig", "eventually", "sending", "step", "time"]
