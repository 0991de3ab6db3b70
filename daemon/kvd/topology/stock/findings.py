"""What to know of a pair of engines that their stock connectors described."""

from __future__ import annotations

from collections.abc import Iterator

from kvd.geometry.model import EngineGeometry
from kvd.topology.findings import Finding


def stock_findings(local: EngineGeometry, remote: EngineGeometry) -> Iterator[Finding]:
    """All of them; none of a pair of our own engines."""
    yield from _one_engine(local, remote)
    yield from _undescribed(local, remote)


def _one_engine(local: EngineGeometry, remote: EngineGeometry) -> Iterator[Finding]:
    """Two addresses that lead to one engine."""
    if "connector" in local.facts and (local.engine_id, local.generation) == (
        remote.engine_id,
        remote.generation,
    ):
        yield Finding(
            "ENGINE_ID_MISMATCH",
            "error",
            f"both addresses lead to {local.engine_id}: a decoder that asks there reads from itself",
            "set VLLM_NIXL_SIDE_CHANNEL_HOST to an address that others reach, and a port of its own for each engine",
        )


def _undescribed(local: EngineGeometry, remote: EngineGeometry) -> Iterator[Finding]:
    """Engines whose pages nobody told: what moves cannot be said."""
    unknown = [engine.engine_id for engine in (local, remote) if not engine.workers]
    if unknown:
        yield Finding(
            "MODEL_UNKNOWN",
            "info",
            f"the handshake does not name the model of {' and '.join(dict.fromkeys(unknown))}: who reads which bytes is"
            " unknown",
            "give it behind the address: nixl://HOST:PORT:model=qwen3-32b,tp=4",
        )
