"""Draining: operators' word that engines are to take nothing new, how far they are, and the way to their schedulers."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from dataclasses import dataclass

from kvd.service.daemon import Daemon
from kvd.service.engines.draining import Drain
from kvd.service.engines.lease_entry import INHERITED
from kvd.service.engines.local_engine import Client, LocalEngine
from kvd.service.errors import RequestRefused
from kvd.service.handlers.forwarding import ask_client
from kvd.service.handlers.operators import permitted, refuse_no_operator
from kvd.service.handlers.pages import whose
from kvd.service.handlers.sight import sight_of
from kvd.service.slices import paced
from kvd.service.sockets.router import Caller
from kvd.wire.drain import DrainEngines, DrainRow, EngineHolds, EnginesDraining, SetDraining

LONGEST_GRACE = 3600.0
"""Seconds that an engine may be given at most."""
ASKED_A_TURN = 16
"""Schedulers that are asked in one turn of the loop: a host may have 10,000."""
UNTOLD = "its scheduler does not say: kvd itself lets no further reader in"


async def drain_engines(daemon: Daemon, caller: Caller, message: DrainEngines) -> EnginesDraining:
    """Drain engines, undo that, or say how far they are. Raises `RequestRefused`."""
    if message.action == "begin" and not 0 <= message.grace_seconds <= LONGEST_GRACE:
        raise RequestRefused(
            "KVD-BAD-ORDER",
            f"{message.grace_seconds:g} s is no time for a drain, wanted are 0 to {LONGEST_GRACE:g}",
        )
    if message.engine_id:
        engine, _ = await permitted(daemon, caller, message.engine_id)
        found = [engine]
    elif message.action == "look":
        sight = await sight_of(daemon, caller)
        found = [engine for engine in _drainable(daemon) if sight.of(engine.uid)]
    else:
        await refuse_no_operator(daemon, caller, "drain all engines of this host")
        found = _drainable(daemon)
        daemon.drains.host = message.grace_seconds if message.action == "begin" else None
    if message.action != "look":
        name = message.engine_id or "all"
        daemon.counters[f"orders.drain_{message.action}"] += 1
        daemon.events.emit(
            "order.drain", name, uid=caller.uid, pid=caller.pid, engines=len(found), undo=message.action == "undo"
        )  # fmt: skip
        async for engine in paced(found):
            _change(daemon, engine, message)
    async with daemon.slices.turn(whose(caller)):
        counts = await _counted(daemon, found)
    asked = [asyncio.create_task(_row(daemon, engine, counts)) async for engine in paced(found, ASKED_A_TURN)]
    return EnginesDraining(rows=tuple(await asyncio.gather(*asked)), host=daemon.drains.host is not None)


def registered(daemon: Daemon, scheduler: Client, seconds: float | None, *, again: bool) -> None:
    """A scheduler registered, ``again`` if this kvd knows it, and says in how many ``seconds`` it takes nothing new.

    What this kvd knows counts; of one that is new here, what it says, and else what is told of the whole host.
    """
    drains = daemon.drains
    engine_id = scheduler.engine.engine_id
    if not again and seconds is not None:
        drains.begin(scheduler, max(0.0, seconds))
    elif not again and drains.host is not None:
        drains.begin(scheduler, drains.host)
    drain = drains.of.get(engine_id)
    if (drain is None) != (seconds is None):
        daemon.local.send(scheduler.route, _told(drain))


def _drainable(daemon: Daemon) -> list[LocalEngine]:
    """The engines whose scheduler is here: what others have here is drained with their home."""
    engines = sorted(daemon.registry.engines.values(), key=lambda engine: engine.facts.engine_id)
    return [engine for engine in engines if engine.scheduler is not None]


def _change(daemon: Daemon, engine: LocalEngine, message: DrainEngines) -> None:
    if engine.scheduler is None:
        return
    if message.action == "begin":
        daemon.drains.begin(engine.scheduler, message.grace_seconds)
    else:
        daemon.drains.end(engine.facts.engine_id)


@dataclass(frozen=True, slots=True)
class _Counts:
    """Leases with readers, by the engine that gave them, and claims, by the engine that made them."""

    claimed: Counter[str]
    reads: Counter[str]


async def _counted(daemon: Daemon, found: list[LocalEngine]) -> _Counts:
    """What there is to count of these engines, those that do not drain aside."""
    drained = {engine.facts.engine_id for engine in found} & daemon.drains.of.keys()
    counts = _Counts(Counter(), Counter())
    names = (
        (engine_id, request)
        for engine_id in drained
        for request in tuple(daemon.leases.requests_of(engine_id))
    )
    async for name in paced(names):
        lease = daemon.leases.find(name)
        counts.claimed[name[0]] += lease is not None and bool(lease.readers.keys() - {INHERITED})
    now = time.monotonic()
    async for one in paced(list(daemon.readers.remembered.values())):
        counts.reads[one.client.engine.engine_id] += one.until >= now
    return counts


async def _row(daemon: Daemon, engine: LocalEngine, counts: _Counts) -> DrainRow:
    engine_id, now = engine.facts.engine_id, time.monotonic()
    drain = daemon.drains.of.get(engine_id)
    held, note = await _ask(daemon, engine.scheduler, drain)
    return DrainRow(
        engine_id=engine_id,
        role=engine.facts.role,
        draining=drain is not None,
        age=now - drain.began if drain else 0.0,
        grace=max(0.0, drain.closes - now) if drain else 0.0,
        leases=daemon.leases.count(engine_id),
        claimed=counts.claimed[engine_id],
        reads=counts.reads[engine_id],
        prefills=held.prefills if held else None,
        pushes=held.pushes if held else None,
        loads=held.loads if held else None,
        note=note,
    )


async def _ask(
    daemon: Daemon, scheduler: Client | None, drain: Drain | None
) -> tuple[EngineHolds | None, str]:
    """Tell the scheduler what is so, which may have missed it, and hear what it holds."""
    if scheduler is None:
        return None, "its scheduler has gone"
    try:
        return await ask_client(daemon, scheduler, _told(drain), EngineHolds), ""
    except RequestRefused as refusal:
        told = UNTOLD if refusal.code == "KVD-NOT-TAKEN" else refusal.message
        return None, told


def _told(drain: Drain | None) -> SetDraining:
    seconds = None if drain is None else max(0.0, drain.closes - time.monotonic())
    return SetDraining(seconds=seconds if seconds is None or math.isfinite(seconds) else 0.0)
