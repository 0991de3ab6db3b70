"""Pairs of engines: which of those that kvd knows are one, and what is to be known of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvd.geometry.model import EngineGeometry
from kvd.topology.describe import PairDescription, describe
from kvd.topology.transfer_topology import TransferTopology
from kvd.wire.query import EngineRow


def suggested(
    rows: Sequence[EngineRow], named: EngineRow | None = None
) -> Iterator[tuple[EngineRow, EngineRow]]:
    """The pairs (reader, source) of ready engines; only those that ``named`` is part of where it is given."""
    for reader in rows:
        for other in rows:
            if _makes_sense(reader, other) and (named is None or named in (reader, other)):
                yield reader, other


def _makes_sense(reader: EngineRow, other: EngineRow) -> bool:
    return (
        reader is not other
        and reader.card is not None
        and other.card is not None
        and reader.engine.role in ("decode", "both")
        and other.engine.role in ("prefill", "both")
        and reader.engine.model == other.engine.model
    )


def described(local: EngineGeometry, remote: EngineGeometry, *, tokens: int | None = None) -> PairDescription:
    """What `TransferTopology` says of the pair, with the cost of a request of ``tokens`` tokens if given."""
    if local.engine_id == remote.engine_id or not (local.workers and remote.workers):
        # A model's engines are called by their options: two that are alike have one name, and none is the other.
        return describe(local, remote, tokens=tokens)
    topology = TransferTopology(local, local.workers[0].rank)
    topology.register_remote_engine(remote)
    return topology.describe(remote.engine_id, tokens=tokens)
