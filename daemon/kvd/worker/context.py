"""What every part of a worker knows of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvd.backends.contract import Backend
from kvd.geometry.model import EngineGeometry, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.topology.transfer_topology import TransferTopology
from kvd.wire.card_parts import ToldCard
from kvd.wire.identity import EngineFacts
from kvd.worker.ends import LoadEnds
from kvd.worker.session import SessionProtocol
from kvd.worker.settings import ConnectorSettings


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """One worker: who it is, whom it knows, what it transfers by, and whom it tells.

    ``register`` makes a peer engine known to every thread that has to do with it; it raises `OwnEngine`.
    """

    settings: ConnectorSettings
    topology: TransferTopology
    backend: Backend
    session: Callable[[], SessionProtocol]
    ends: LoadEnds
    register: Callable[[ToldCard], None]

    @property
    def engine_id(self) -> str:
        """This worker's engine."""
        return self.topology.local.engine_id

    @property
    def rank(self) -> Rank:
        """This worker's place in it."""
        return self.topology.rank


def engine_geometry(
    engine: EngineFacts, geometry: WorkerGeometry, siblings: tuple[WorkerGeometry, ...]
) -> EngineGeometry:
    """This engine as far as a worker knows it: the workers of its pipeline stage; no generation, which kvd gives."""
    workers = tuple(geometry if worker.rank == geometry.rank else worker for worker in siblings)
    return EngineGeometry(
        engine.engine_id, "", model=engine.model, tp=engine.tp, pp=engine.pp, dcp=engine.dcp, workers=workers
    )
