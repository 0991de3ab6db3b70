"""What a caller may see, and what is left of what it may not."""

from __future__ import annotations

import msgspec

from kvd.service.daemon import Daemon
from kvd.service.permission import EVERYTHING, Sight
from kvd.service.sockets.router import Caller
from kvd.wire.identity import EngineFacts
from kvd.wire.query import EngineRow, WorkerRow


async def sight_of(daemon: Daemon, caller: Caller) -> Sight:
    """What a caller on the local socket may see; an operator on another host, who was let in, sees all."""
    if caller.operator:
        return EVERYTHING
    config = daemon.config
    return await daemon.operators.sight(caller.uid, config.access.read, config.orders.group)


def own_engines(daemon: Daemon, sight: Sight) -> frozenset[str]:
    """The ids of engines of this host that belong to the user who sees this much."""
    return frozenset(name for name, engine in daemon.registry.engines.items() if sight.of(engine.uid))


def hidden_engine(row: EngineRow) -> EngineRow:
    """Another user's engine: its name and its state."""
    facts = row.engine
    return EngineRow(
        engine=EngineFacts(engine_id=facts.engine_id, model="", role=facts.role, world_size=facts.world_size),
        generation="",
        local=row.local,
        state=row.state,
        ranks=row.ranks,
        since=row.since,
        endpoint=row.endpoint,
        scheduler=row.scheduler,
        hidden=True,
        draining=row.draining,
    )


def hidden_worker(row: WorkerRow) -> WorkerRow:
    """Another user's worker or scheduler: its name and its state."""
    return msgspec.structs.replace(
        row,
        pid=0,
        incarnation="",
        backend="",
        regions=0,
        registered_bytes=0,
        reason="",
        hidden=True,
        locality=None,
    )
