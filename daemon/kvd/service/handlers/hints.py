"""Hints: what schedulers tell of what their engines hold, and what other kvds are told of it.

Only of an engine whose card it was given is a kvd told, as it may ask for prefixes of no other one.
"""

from __future__ import annotations

import asyncio
import time

from kvd.service.daemon import Daemon
from kvd.service.handlers.hosts import knows_engine
from kvd.service.handlers.pages import whose
from kvd.service.handlers.senders import scheduler_of
from kvd.service.sockets.router import Caller
from kvd.wire.identity import HERE
from kvd.wire.limits import bytes_allowed
from kvd.wire.prefix import SCHEME_FACT
from kvd.wire.prefixes.hints import WAIT_SECONDS, EngineHints, GetHints, HintsTaken, HintsTold, TellHints

MOST_BYTES = bytes_allowed("hints_told") - (256 << 10)
"""Tags of one answer, with room left for names."""
LONGEST_PAUSE = 60.0


async def tell_hints(daemon: Daemon, caller: Caller, message: TellHints) -> HintsTaken:
    """Take what an engine's scheduler tells. Raises `RequestRefused` for anyone else."""
    client = scheduler_of(daemon, caller, message.engine_id)
    daemon.counters["prefixes.hints"] += 1
    version = daemon.hints.take((HERE, message.engine_id), client.incarnation, message.change, client.uid)
    return HintsTaken(version=version)


async def get_hints(daemon: Daemon, caller: Caller, message: GetHints) -> HintsTold:
    """What is new of engines here whose cards the asking kvd was given, once there is anything.

    Of each connection one question waits. Answers are made one at a time, as any may have megabytes.
    """
    asking = daemon.hints.ask(caller.route)
    try:
        await asking.paused(min(message.after, LONGEST_PAUSE))
        until = time.monotonic() + WAIT_SECONDS
        while True:
            asking.change.clear()
            async with daemon.hints_told.turn(whose(caller)):
                news = _news(daemon, caller, message)
                await asyncio.sleep(0)
            left = until - time.monotonic()
            if news or asking.over or left <= 0:
                break
            await asking.woken(left)
    finally:
        daemon.hints.answered(caller.route, asking)
    daemon.counters["prefixes.hints_given"] += len(news)
    return HintsTold(engines=news)


def _news(daemon: Daemon, caller: Caller, message: GetHints) -> tuple[EngineHints, ...]:
    known = {(one.engine_id, one.generation): one.version for one in message.known}
    news: list[EngineHints] = []
    size = 0
    for engine_id, engine in daemon.registry.engines.items():
        if (
            engine.scheduler is None
            or not engine.up
            or not engine.facts.facts.get(SCHEME_FACT)
            or not knows_engine(daemon, caller, engine_id)
        ):
            continue
        version = known.get((engine_id, engine.generation), 0)
        change = daemon.hints.since(engine_id, engine.scheduler.incarnation, version)
        if change is None:
            continue
        size += len(change.added) + len(change.dropped)
        if news and size > MOST_BYTES:
            break  # the next question asks for the rest
        news.append(EngineHints(engine_id=engine_id, generation=engine.generation, change=change))
    return tuple(news)
