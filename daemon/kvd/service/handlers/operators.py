"""Who may order an engine about: its own user, and those who run this host's kvd."""

from __future__ import annotations

from kvd.service.daemon import Daemon
from kvd.service.engines.local_engine import Client, LocalEngine
from kvd.service.errors import RequestRefused
from kvd.service.sockets.router import Caller


async def permitted(daemon: Daemon, caller: Caller, engine_id: str) -> tuple[LocalEngine, Client]:
    """The engine and its scheduler, if the caller may order it about. Raises `RequestRefused`."""
    engine = daemon.registry.engines.get(engine_id)
    scheduler = engine.scheduler if engine is not None else None
    own = scheduler is not None and caller.uid >= 0 and caller.uid == scheduler.uid
    group = daemon.config.orders.group
    if not own and not await daemon.operators.has(caller.uid, group):
        also = f" and members of group {group}" if group else ""
        raise RequestRefused(
            "KVD-NOT-PERMITTED",
            f"uid {caller.uid} may not give orders to engine {engine_id!r}: root, the user of kvd and that of the"
            f" engine may{also}",
            hint="become one of them, or have orders.group set in the configuration of kvd",
        )
    if engine is None or engine.state == "gone":
        raise daemon.registry.not_ready(engine_id)
    if scheduler is None:
        raise RequestRefused(
            "KVD-ENGINE-PARTIAL",
            f"the scheduler of engine {engine_id!r} is not registered here",
            hint="`kvctl workers` lists who is; wait for it, or see the log of the engine",
        )
    return engine, scheduler


async def refuse_no_operator(daemon: Daemon, caller: Caller, what: str) -> None:
    """Raise `RequestRefused`, with ``what`` he cannot do, for whoever does not run this host's kvd."""
    group = daemon.config.orders.group
    if await daemon.operators.has(caller.uid, group):
        return
    also = f" and members of group {group}" if group else ""
    raise RequestRefused(
        "KVD-NOT-PERMITTED",
        f"uid {caller.uid} may not {what}: root and the user of kvd may{also}",
        hint="become one of them, or have orders.group set in the configuration of kvd",
    )
