"""The one place that knows remote engines, and answers for this worker and each of them.

`TransferTopology` is the register: one in each worker, one wherever such questions are asked. `RemoteEngine` is one
generation in it. A thread that acts for a while on a generation (a lane is connected to one) keeps its `RemoteEngine`:
that never changes, and `TransferTopology.find` tells when another one has taken its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cached_property

from kvd.geometry.errors import NotTold
from kvd.geometry.model import EngineGeometry, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.topology.compat import block_tokens
from kvd.topology.describe import PairDescription, describe, largest_block
from kvd.topology.errors import OwnEngine, UnknownEngine
from kvd.topology.plan import Plan, plan_part, plan_worker
from kvd.topology.push import LayerPush, plan_push

MOST_PARTS = 64
"""Sets of layers for which a plan of their own is kept: a prefiller tells of the same few again and again."""


class RemoteEngine:
    """One generation of a remote engine, as one local worker sees it.

    Its geometry is read and its plans are made when they are first asked for, once, on the thread that asks. Any number
    of threads may ask. ``gone`` says why it was forgotten, to whoever still has it.
    """

    def __init__(
        self,
        local: EngineGeometry,
        worker: WorkerGeometry,
        engine_id: str,
        generation: str,
        read: Callable[[], EngineGeometry],
        read_metadata: Callable[[], Mapping[Rank, bytes]],
    ) -> None:
        """For ``worker`` of ``local``. ``read`` gives the remote engine's geometry, or raises its `GeometryError`.

        ``read_metadata`` gives what its workers exported, as far as that was told.
        """
        self.engine_id = engine_id
        self.generation = generation
        self.gone = ""
        self._local = local
        self._worker = worker
        self._read = read
        self._read_metadata = read_metadata
        self._lock = threading.RLock()
        self._pushes: dict[Rank, dict[str, LayerPush]] = {}
        self._layer_reads: dict[Rank, dict[str, LayerPush]] = {}
        self._parts: dict[tuple[Rank, frozenset[str]], Plan] = {}

    @cached_property
    def metadata(self) -> Mapping[Rank, bytes]:
        """What its workers exported, as far as that was told."""
        return self._read_metadata()

    @property
    def geometry(self) -> EngineGeometry:
        """The engine's geometry. Raises `GeometryError` where its card cannot be read."""
        with self._lock:
            return self._geometry

    @property
    def plan(self) -> Plan:
        """The local worker's plan for reading from the engine. Raises as `geometry` and `plan_worker`."""
        with self._lock:
            return self._plan

    @property
    def devices(self) -> tuple[str, ...]:
        """Those of all memory that takes part in the plan, the local worker's first. Raises as `plan`."""
        sides = (self._worker, *(self.geometry.workers[position] for position in self.plan.sources))
        return tuple(region.device for worker in sides for region in worker.regions)

    @property
    def handshake_targets(self) -> dict[Rank, bytes]:
        """The workers that the local one reads anything from, with what each exported. Raises as `plan`."""
        plan = self.plan
        ranks = [plan.remote_ranks[position] for position in plan.sources]
        return {rank: self.metadata_of(rank) for rank in ranks}

    def metadata_of(self, rank: Rank) -> bytes:
        """What one of its workers exported. Raises `UnknownEngine` where there is none of that rank, and `NotTold`."""
        if rank in self.metadata:
            return self.metadata[rank]
        raise NotTold(self.worker(rank).rank, "metadata")

    def worker(self, rank: Rank) -> WorkerGeometry:
        """One of its workers. Raises `UnknownEngine` where there is none of that rank."""
        found = self.geometry.by_rank.get(rank)
        if found is None:
            raise UnknownEngine(f"it has no worker {rank}, it has {len(self.geometry.workers)} others")
        return found

    def pushes(self, target: Rank) -> dict[str, LayerPush]:
        """What the local worker writes to worker ``target``, by layer. Raises as `geometry`, `plan_push`, `worker`."""
        with self._lock:
            if target not in self._pushes:
                self._pushes[target] = plan_push(
                    self.worker(target), self.geometry.workers, self._local.workers, self._worker.rank
                )
            return self._pushes[target]

    def layer_reads(self, source: Rank) -> dict[str, LayerPush]:
        """What worker ``source`` supplies to the local one, by layer. Raises as `geometry` and `plan_push`."""
        with self._lock:
            if source not in self._layer_reads:
                self._layer_reads[source] = plan_push(
                    self._worker, self._local.workers, self.geometry.workers, source
                )
            return self._layer_reads[source]

    def part(self, source: Rank, layers: frozenset[str]) -> Plan | None:
        """The plan for reading some layers from worker ``source`` alone, as blocks; raises as `layer_reads`.

        Where that is all there is to read of their groups it is `plan`. None where `MOST_PARTS` others are kept.
        """
        with self._lock:
            reads = self.layer_reads(source)
            groups = {reads[layer].group for layer in layers}
            whole = layers == {layer for layer, push in reads.items() if push.group in groups}
            if whole and len(self._plan.sources) == 1:
                return self._plan
            key = source, layers
            if key not in self._parts:
                if len(self._parts) >= MOST_PARTS:
                    return None
                self._parts[key] = plan_part(
                    self._worker, self._local.workers, self._geometry.workers, layers, source
                )
            return self._parts[key]

    def describe_line(self) -> str:
        """Who reads what from whom in one line, of the same form for every kind of model. Raises as `plan`.

        By group: tokens in a block here and there, and the most bytes that a block of one layer takes.
        """
        plan, remote = self.plan, self.geometry
        sources = " ".join(str(plan.remote_ranks[position]) for position in plan.sources)
        groups = "; ".join(self._group(index, plan) for index in range(len(self._worker.groups)))
        here = f"{plan.local_rank} of {self._local.engine_id} (tp{self._local.tp})"
        there = f"{self.engine_id} (tp{remote.tp}, generation {self.generation})"
        return f"{here} reads from {sources or 'nobody'} of {there}; {groups}"

    def _group(self, index: int, plan: Plan) -> str:
        group = self._worker.groups[index]
        reads = [read for read in plan.reads if read.group == index]
        size = largest_block((r.phase.local, r.layers, r.layer_bytes) for r in reads)
        theirs = {plan.remote_block_sizes[read.remote_group] for read in reads}
        tokens = (
            "states"
            if group.kind == "mamba"
            else f"blocks of {block_tokens(group)} from {max(theirs, default=0)}"
        )
        heads = {read.heads for read in reads if read.heads is not None}
        of_heads = f", heads {min(h[0] for h in heads)}..{max(h[1] for h in heads) - 1}" if heads else ""
        return f"group {index} {group.kind}: {tokens}, {size} bytes a layer{of_heads}"

    @cached_property
    def _geometry(self) -> EngineGeometry:
        return self._read()

    @cached_property
    def _plan(self) -> Plan:
        return plan_worker(self._worker, self._local.workers, self._geometry.workers)


class TransferTopology:
    """Every remote engine that one local worker knows, and who it reads what from.

    Safe for any number of threads. What there is to know of one engine, its `RemoteEngine` answers.
    """

    def __init__(self, local: EngineGeometry, rank: Rank) -> None:
        """For worker ``rank`` of ``local``. Raises `UnknownEngine` where the engine has no such worker."""
        if rank not in local.by_rank:
            raise UnknownEngine(
                f"engine {local.engine_id} has no worker {rank}, it has {len(local.workers)} others"
            )
        self.local = local
        self.rank = rank
        self.worker = local.by_rank[rank]
        self._lock = threading.Lock()
        self._remotes: dict[str, RemoteEngine] = {}

    def register_remote_engine(self, remote: EngineGeometry) -> RemoteEngine:
        """Know ``remote`` from now on; another generation takes the place of the one before, and its plans go.

        Registering one generation twice changes nothing and gives the same object. Raises `OwnEngine` for the local
        engine.
        """
        return self.register_card(remote.engine_id, remote.generation, lambda: remote)

    def register_card(
        self,
        engine_id: str,
        generation: str,
        read: Callable[[], EngineGeometry],
        read_metadata: Callable[[], Mapping[Rank, bytes]] = dict,
    ) -> RemoteEngine:
        """`register_remote_engine` of an engine whose card is yet to be read; see `RemoteEngine`."""
        if engine_id == self.local.engine_id:
            raise OwnEngine(f"engine {engine_id} is this engine itself: nothing is transferred within one")
        with self._lock:
            known = self._remotes.get(engine_id)
            if known is None or known.generation != generation:
                known = self._remotes[engine_id] = RemoteEngine(
                    self.local, self.worker, engine_id, generation, read, read_metadata
                )
            return known

    def forget_remote_engine(self, engine_id: str, generation: str = "", reason: str = "") -> None:
        """Forget an engine, or only that generation of it; one that is not known is forgotten already."""
        with self._lock:
            known = self._remotes.get(engine_id)
            if known is not None and generation in ("", known.generation):
                known.gone = reason
                del self._remotes[engine_id]

    def find(self, engine_id: str) -> RemoteEngine | None:
        """The generation that is registered now, None where there is none. Takes no lock."""
        return self._remotes.get(engine_id)

    def remote(self, engine_id: str) -> RemoteEngine:
        """`find`, but raises `UnknownEngine` where there is none."""
        found = self.find(engine_id)
        if found is None:
            raise UnknownEngine(
                f"engine {engine_id} is not registered; known are {', '.join(self._remotes) or 'none'}"
            )
        return found

    def describe(self, engine_id: str, *, tokens: int | None = None) -> PairDescription:
        """Everything to know about reading from the engine, for all workers of this one. See `describe`."""
        return describe(self.local, self.remote(engine_id).geometry, tokens=tokens)
