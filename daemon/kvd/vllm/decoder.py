"""A decoding engine as a prefilling worker knows it: its workers, and what this worker supplies of each of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd.client.cards import engine_geometry
from kvd.geometry.model import Rank, WorkerGeometry
from kvd.topology.errors import UnknownEngine
from kvd.topology.push import LayerPush, plan_push
from kvd.wire.identity import EngineCard, RankId


@dataclass(frozen=True, slots=True)
class Decoder:
    """One generation of a decoding engine; plans are made when a worker is first asked for."""

    generation: str
    workers: dict[RankId, WorkerGeometry]
    siblings: tuple[WorkerGeometry, ...]
    source: Rank
    _plans: dict[RankId, dict[str, LayerPush]] = field(default_factory=dict)

    @property
    def ranks(self) -> frozenset[RankId]:
        """All its workers."""
        return frozenset(self.workers)

    def plan(self, rank: RankId) -> dict[str, LayerPush]:
        """What this worker supplies of one of the decoder's, by layer. Raises `TopologyError`."""
        if rank not in self.workers:
            raise UnknownEngine(f"it has no worker {rank}, it has {len(self.workers)} others")
        if rank not in self._plans:
            targets = tuple(self.workers.values())
            self._plans[rank] = plan_push(self.workers[rank], targets, self.siblings, self.source)
        return self._plans[rank]


def know_decoder(card: EngineCard, siblings: tuple[WorkerGeometry, ...], source: Rank) -> Decoder:
    """The decoder that a card describes, for worker ``source`` of ``siblings``. Raises `GeometryError`."""
    workers = engine_geometry(card).workers
    by_rank = {RankId(tp=w.rank.tp, pp=w.rank.pp, dcp=w.rank.dcp): w for w in workers}
    return Decoder(card.generation, by_rank, siblings, source)
