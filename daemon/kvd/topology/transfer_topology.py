"""The one place that answers for pairs of engines: this engine's topology towards each remote engine that it knows."""

from __future__ import annotations

from collections.abc import Mapping

from kvd.geometry.model import EngineGeometry, Page
from kvd.geometry.rank import Rank
from kvd.topology.blocks import BlockList
from kvd.topology.compat import Factor, compare
from kvd.topology.compile import compile_plan
from kvd.topology.describe import PairDescription, describe
from kvd.topology.descriptors import Descriptors
from kvd.topology.errors import BlockMismatch, UnknownEngine
from kvd.topology.plan import Plan, Read, plan_worker


def _boxes(page: Page) -> tuple[object, ...]:
    """Which elements of which fields a page holds, whatever their place in it."""
    return tuple((f.name, *((a.label, a.start, a.extent, a.step) for a in f.axes)) for f in page.fields)


class TransferTopology:
    """Who one local worker reads from, for every remote engine.

    Holds geometries and the plans made from them; every answer is a thin call of a pure function. Questions about an
    engine that is not registered raise `UnknownEngine`; those that need a plan raise what `plan_worker` raises.
    """

    def __init__(self, local: EngineGeometry, rank: Rank) -> None:
        """For worker ``rank`` of ``local``. Raises `UnknownEngine` where the engine has no such worker."""
        if rank not in local.by_rank:
            raise UnknownEngine(
                f"engine {local.engine_id} has no worker {rank}, it has {len(local.workers)} others"
            )
        self.local = local
        self.rank = rank
        self._remotes: dict[str, EngineGeometry] = {}
        self._plans: dict[str, Plan] = {}

    def register_remote_engine(self, remote: EngineGeometry) -> bool:
        """Know ``remote`` from now on; a new generation replaces the old one and its plan.

        Returns whether anything changed. Registering one generation twice changes nothing.
        """
        known = self._remotes.get(remote.engine_id)
        if known is not None and known.generation == remote.generation:
            return False
        self._remotes[remote.engine_id] = remote
        self._plans.pop(remote.engine_id, None)
        return True

    def forget_remote_engine(self, engine_id: str) -> None:
        """Forget an engine; one that is not known is forgotten already."""
        self._remotes.pop(engine_id, None)
        self._plans.pop(engine_id, None)

    def engine_info(self, engine_id: str) -> EngineGeometry:
        """The geometry that was registered last."""
        if engine_id not in self._remotes:
            raise UnknownEngine(
                f"engine {engine_id} is not registered; known are {', '.join(self._remotes) or 'none'}"
            )
        return self._remotes[engine_id]

    def plan(self, engine_id: str) -> Plan:
        """This worker's plan for reading from the engine; made once a generation."""
        remote = self.engine_info(engine_id)
        if engine_id not in self._plans:
            self._plans[engine_id] = plan_worker(
                self.local.by_rank[self.rank], self.local.workers, remote.workers
            )
        return self._plans[engine_id]

    def tp_ratio(self, engine_id: str) -> tuple[int, int]:
        """Tensor parallel sizes (local, remote); sizes that do not divide each other are a ratio like any other."""
        return self.local.tp, self.engine_info(engine_id).tp

    def block_size_ratio(self, engine_id: str, group: int) -> tuple[int, int]:
        """Block sizes in tokens (local, remote) of a local group and of the remote group that its layers stand in."""
        plan = self.plan(engine_id)
        remote_group = next(iter(self._reads(engine_id, group))).remote_group
        return plan.block_sizes[group], plan.remote_block_sizes[remote_group]

    def handshake_target_ranks(self, engine_id: str) -> tuple[Rank, ...]:
        """The remote ranks that this worker reads anything from, hence whose metadata it needs."""
        plan = self.plan(engine_id)
        return tuple(plan.remote_ranks[i] for i in plan.sources)

    def source_ranks(self, engine_id: str, group: int) -> tuple[Rank, ...]:
        """The remote ranks that this worker reads a group from."""
        plan = self.plan(engine_id)
        return tuple(plan.remote_ranks[i] for i in sorted({r.remote for r in self._reads(engine_id, group)}))

    def replicas(self, engine_id: str, layer: str) -> int:
        """How many remote workers hold the same part of a layer as the first that has it."""
        workers = self.engine_info(engine_id).workers
        boxes = [_boxes(w.layers[layer][1].page) for w in workers if layer in w.layers]
        return boxes.count(boxes[0]) if boxes else 0

    def physical_heads(self, layer: str) -> int:
        """Heads of a layer that this worker holds; 0 where the layer has no heads or the worker no such layer."""
        first, last = self._heads(layer)
        return last - first

    def head_slots(self, engine_id: str, layer: str) -> Mapping[Rank, tuple[int, int]]:
        """For each remote rank that heads come from, the first and one past the last head *of this worker's page*."""
        plan = self.plan(engine_id)
        first, _ = self._heads(layer)
        return {
            plan.remote_ranks[read.remote]: (read.heads[0] - first, read.heads[1] - first)
            for read in plan.reads
            if layer in read.layers and read.heads is not None
        }

    def bytes_per_block(self, engine_id: str, group: int) -> Mapping[Rank, int]:
        """Bytes that one local block takes from each remote rank, over all layers of the group.

        Of unequal block sizes the average over the blocks of one period.
        """
        plan = self.plan(engine_id)
        total: dict[Rank, int] = {}
        for read in self._reads(engine_id, group):
            rank = plan.remote_ranks[read.remote]
            total[rank] = total.get(rank, 0) + read.bytes_per_block
        period = next(iter(self._reads(engine_id, group))).phase.local_period
        return {rank: count // period for rank, count in total.items()}

    def descriptors(
        self, engine_id: str, local: Mapping[int, BlockList], remote: Mapping[int, BlockList], *, tokens: int
    ) -> dict[Rank, Descriptors]:
        """What to copy for one request, by remote rank. See `compile_plan`."""
        plan = self.plan(engine_id)
        compiled = compile_plan(plan, local, remote, tokens=tokens)
        return {plan.remote_ranks[position]: rows for position, rows in compiled.items()}

    def compatibility(self, engine_id: str) -> tuple[Factor, ...]:
        """Factor by factor, whether the two engines fit."""
        return compare(self.local, self.engine_info(engine_id))

    def describe(self, engine_id: str) -> PairDescription:
        """Everything to know about reading from the engine, for all workers of this one."""
        return describe(self.local, self.engine_info(engine_id))

    def _reads(self, engine_id: str, group: int) -> tuple[Read, ...]:
        reads = tuple(read for read in self.plan(engine_id).reads if read.group == group)
        if not reads:
            raise BlockMismatch(f"worker {self.rank} reads nothing of group {group}")
        return reads

    def _heads(self, layer: str) -> tuple[int, int]:
        """First and one past the last of the model's heads that this worker has of a layer; (0, 0) for none."""
        known = self.local.by_rank[self.rank].layers
        keys = known[layer][1].page.by_name.get("k") if layer in known else None
        axes = keys.axes_of("head") if keys else ()
        return (axes[0].start, axes[0].start + axes[0].extent) if axes else (0, 0)
