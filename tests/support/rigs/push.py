"""A decoding worker and a scripted prefiller: real geometry and plans, windows that can be taken away, no kvd.

The test speaks for the prefilling workers: it looks at what was announced, writes through the window and says so.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from kvd.backends.errors import BackendUnavailable
from kvd.backends.memory import Faults, MemoryBackend, open_backend
from kvd.client.cards import engine_geometry
from kvd.geometry.rank import Rank
from kvd.topology.blocks import BlockList
from kvd.topology.descriptors import Descriptors
from kvd.topology.push import compile_chunk, plan_push
from kvd.vllm.memory.tensors import sibling_geometries, worker_geometry
from kvd.wire.frame import Message
from kvd.wire.handshake import PeerGone, PeerReady
from kvd.wire.identity import EngineCard, EngineFacts
from kvd.wire.push import BlockRun, LayersThere, PushAnnounce, PushDone, PushProgress, PushWithdraw
from kvd.wire.reply import Ok
from kvd.wire.transfer import ReportTransfers, TransferRecord
from kvd.worker.cause import text_of
from kvd.worker.orders import LoadOrder, StepOrders
from kvd.worker.reporting import Results
from kvd.worker.settings import ConnectorSettings
from kvd.worker.worker import WorkerHalf
from tests.support.rigs.bench import (
    BF16,
    GENERATION,
    Script,
    Tensor,
    cache_config,
    dense,
    eventually,
    full,
    groups_of,
    place,
    prefill,
)
from tests.support.rigs.pull import Gates, SlowBackend, gather

BLOCKS = 16
HEADS = 2
"""Of the model, over all ranks."""
Buffer = np.ndarray[tuple[int], np.dtype[np.uint16]]
Quiet = Callable[[float], None]
FAR = 600.0
"""Seconds that no test waits for."""


@dataclass
class Window:
    """What a prefiller writes into: the bytes land while it is open, and `progress` was called since the write."""

    number: int
    gates: Gates
    open: bool = True
    served: int = 0

    def metadata(self) -> bytes:
        return b"landing %d" % self.number

    def progress(self) -> None:
        self.gates.pass_("progress")
        self.served += 1

    def close(self) -> None:
        self.gates.pass_("window.close")
        if self.gates.close_errors:
            self.gates.close_tried.set()
            raise self.gates.close_errors[0]
        self.open = False

    def write(self, rows: Descriptors) -> None:
        """Copy from the prefiller's memory, if this window is still there."""
        if self.open:
            for source, target, length in zip(
                rows.local.tolist(), rows.remote.tolist(), rows.length.tolist(), strict=True
            ):
                ctypes.memmove(target, source, length)


class WindowBackend(SlowBackend):
    """A memory backend with windows; ``refused`` is why none can be made."""

    def __init__(self, inner: MemoryBackend, gates: Gates) -> None:
        super().__init__(inner, gates)
        self.traits = replace(inner.traits, lands=True)
        self.windows: list[Window] = []
        self.refused = ""

    def window(self, name: str) -> Window:  # noqa: ARG002 - as the real one
        self._gates.pass_("window")
        if self.refused:
            raise BackendUnavailable(self.refused)
        self.windows.append(Window(len(self.windows), self._gates))
        return self.windows[-1]


@dataclass
class Engine:
    """One engine's workers: memory, cards."""

    buffers: list[Buffer] = field(default_factory=list)
    workers: list[WorkerHalf] = field(default_factory=list)
    scripts: list[Script] = field(default_factory=list)

    def card(self, generation: str = GENERATION) -> EngineCard:
        cards = tuple(script.card().card for script in self.scripts)
        return EngineCard(engine=cards[0].engine, generation=generation, workers=cards)


class PushRig:
    """Engine ``p`` of ``prefill_tp`` workers has computed a prompt; worker 0 of engine ``d`` waits for it.

    A block holds 4 tokens on both sides; layers are l0, l1, unless ``config`` says otherwise.
    """

    def __init__(
        self,
        *,
        prefill_tp: int = 1,
        decode_tp: int = 1,
        lands: bool = True,
        specs: Sequence[tuple[Any, tuple[str, ...]]] | None = None,
        settings: ConnectorSettings | None = None,
    ) -> None:
        self.settings = settings or ConnectorSettings(
            backend="memory", mode="push", probe=False, handshake_timeout=5.0
        )
        self.gates, self.faults = Gates(), Faults()
        self.specs = specs
        self.layers = 2 if specs is None else sum(len(names) for _, names in specs)
        self.lands = lands
        self.p, self.d = Engine(), Engine()
        for tp in range(prefill_tp):
            self._worker(self.p, "p", tp, prefill_tp, Faults(), Gates(), lands=False)
        for tp in range(decode_tp):
            self._worker(self.d, "d", tp, decode_tp, self.faults, self.gates, lands=lands)
        for n, buffer in enumerate(self.p.buffers):
            buffer[:] = np.random.default_rng(n).integers(1, 65535, len(buffer), np.uint16)
        self.decoder, self.script, self.target = self.d.workers[0], self.d.scripts[0], self.d.buffers[0]
        self.backend: Any = self.decoder._backend
        self.script.state = replace(self.script.state, engine_generation="d-gen")
        self.know()

    def _worker(
        self, engine: Engine, name: str, tp: int, size: int, faults: Faults, gates: Gates, *, lands: bool
    ) -> None:
        heads = HEADS // size
        config = cache_config(BLOCKS, *(self.specs or [(full(heads=heads), ("l0", "l1"))]))
        elements = heads * 4 * 8
        buffer: Buffer = np.zeros(self.layers * BLOCKS * elements, np.uint16)
        shape = (BLOCKS, heads, 4, 8)
        tensors = {
            f"l{n}": Tensor(buffer, BF16, shape, dense(shape), n * BLOCKS * elements * 2)
            for n in range(self.layers)
        }
        groups, script = groups_of(config), Script()
        inner = open_backend(f"{name}{tp}", options={"faults": faults})
        where = place(tp, size, HEADS)
        engine.buffers.append(buffer)
        engine.scripts.append(script)
        engine.workers.append(
            WorkerHalf(
                self.settings,
                EngineFacts(engine_id=name, model="m", groups=len(groups), tp=size, world_size=size),
                worker_geometry(tensors, config, groups, where),
                sibling_geometries(tensors, config, groups, where),
                WindowBackend(inner, gates) if lands else _unlanded(SlowBackend(inner, gates)),
                script.open,
                memory=tensors,
            )
        )

    # --- what kvd and the prefiller say ---

    def know(self, generation: str = GENERATION) -> None:
        self.script.push(PeerReady(local_engine="d", peer=self.p.card(generation)))

    def gone(self, generation: str = GENERATION) -> None:
        self.script.push(PeerGone(engine_id="p", generation=generation, reason="tp0 was killed"))

    def start(self, *orders: LoadOrder) -> None:
        self.decoder.start(StepOrders(loads=list(orders)))

    def announced(self, count: int = 1) -> list[PushAnnounce]:
        """All announcements so far, at least so many."""
        return eventually(lambda: found if len(found := self.script.told(PushAnnounce)) >= count else [])

    def answer(self, number: int = -1, answer: Message | Exception | None = None) -> None:
        """The prefiller's kvd answers an announcement."""
        self.announced()
        asked = [a for a in self.script.delivered if isinstance(a.message, PushAnnounce)][number]
        if isinstance(answer, Exception):
            asked.future.set_exception(answer)
        else:
            asked.future.set_result(answer or Ok())

    def withdrawn(self, count: int = 1) -> list[PushWithdraw]:
        return eventually(lambda: found if len(found := self.script.told(PushWithdraw)) >= count else [])

    def done(self) -> list[PushDone]:
        return self.script.told(PushDone)

    def say(
        self, *layers: str, tp: int = 0, name: str = "x", attempt: int | None = None, **more: Any
    ) -> None:
        """A prefilling worker's word: these layers are there, or what ``more`` says."""
        announced = [a for a in self.announced() if a.key.transfer_id == name][-1]
        key = announced.key if attempt is None else msgspec.structs.replace(announced.key, attempt=attempt)
        there = tuple(LayersThere(group=0, layers=(layer,), tokens=announced.tokens) for layer in layers)
        told = PushProgress(key=key, source=Rank(tp=tp), **{"there": there, **more})
        assert isinstance(self.script.push(told), Ok)

    def readable(
        self, layer: str | tuple[str, ...], tokens: int, *ids: int, tp: int = 0, name: str = "x"
    ) -> None:
        """A prefilling worker's word: these layers can be read up to so many tokens, in these blocks."""
        blocks = BlockRun(group=0, first=0, ids=ids)
        layers = (layer,) if isinstance(layer, str) else layer
        self.say(tp=tp, name=name, there=(LayersThere(group=0, layers=layers, tokens=tokens, blocks=blocks),))

    def expire(self, request_id: str = "d-1") -> None:
        """The time of an announced load is up."""
        self.announced()
        self.decoder.loads.begun[request_id].deadline = time.monotonic() - 0.001
        self.say(
            name=self.decoder.loads.begun[request_id].order.transfer_id, attempt=-1
        )  # have the thread look

    # --- bytes ---

    def rows(self, layer: str, announced: PushAnnounce, blocks: Sequence[int], *, tp: int = 0) -> Descriptors:
        """What a prefilling worker writes of a layer, all of it, from its ``blocks``."""
        remotes = engine_geometry(self.p.card()).workers
        push = plan_push(self.decoder.geometry, self.decoder.topology.local.workers, remotes, Rank(tp=tp))[
            layer
        ]
        local = {run.group: BlockList(run.first, np.array(run.ids, np.int64)) for run in announced.blocks}
        source = {push.source_group: BlockList(0, np.array(blocks, np.int64))}
        total = announced.tokens
        return compile_chunk(push, source, local, total=total, first=0, last=total)

    def write(self, layer: str, announced: PushAnnounce, blocks: Sequence[int], *, tp: int = 0) -> None:
        """Write a layer through the window that was announced, and say so."""
        window = next(x for x in self.backend.windows if x.metadata() == announced.window)
        window.write(self.rows(layer, announced, blocks, tp=tp))
        self.say(layer, tp=tp, name=announced.key.transfer_id, attempt=announced.key.attempt)

    def same(self, local: Sequence[int], remote: Sequence[int]) -> bool:
        """Whether worker 0 of the decoder holds in ``local`` what the prefiller has in ``remote``, in all layers."""
        whole = np.concatenate(
            [b.reshape(self.layers, BLOCKS, -1) for b in self.p.buffers], axis=2
        )  # heads are the outermost axis of a block, so ranks follow each other
        mine = self.target.reshape(self.layers, BLOCKS, -1)
        return bool((mine[:, list(local)] == whole[:, list(remote), : mine.shape[2]]).all())

    def untouched(self, *ids: int) -> bool:
        return not self.target.reshape(self.layers, BLOCKS, -1)[:, list(ids)].any()

    # --- what comes out ---

    def results(self, count: int = 1) -> Results:
        return gather(self.decoder, count)

    def causes(self) -> dict[str, str]:
        outcomes = self.decoder.outcomes()
        return {name: text_of(cause) for name, cause in outcomes.loads.items()} if outcomes else {}

    def record(self) -> TransferRecord:
        """The newest one."""
        return eventually(lambda: self.script.told(ReportTransfers))[-1].records[-1]

    def close(self) -> None:
        for event in self.gates.hang.values():
            event.set()
        self.gates.close_errors.clear()
        for worker in (*self.d.workers, *self.p.workers):
            worker.close()


def _unlanded(backend: SlowBackend) -> SlowBackend:
    backend.traits = replace(backend.traits, lands=False)
    return backend


def pushed(
    *local: tuple[int, ...],
    name: str = "x",
    request_id: str = "d-1",
    tokens: int = 8,
    computed: int = 0,
    seconds: float = 30.0,
    generation: str = GENERATION,
) -> LoadOrder:
    """An order of a push into these blocks, by group."""
    remote = prefill((), generation=generation, tokens=tokens)
    return LoadOrder(
        request_id=request_id,
        prefill=msgspec.structs.replace(remote, request_id=""),
        groups={g: (computed // 4, ids) for g, ids in enumerate(local)},
        tokens=tokens,
        seconds=seconds,
        claimed=time.monotonic(),
        transfer_id=name,
        computed=computed,
    )
