"""Prefixes: who holds one, asked of the engines here and of other kvds; and whether a holder still held what was read.

Only an engine that was given a holder's card is told of what that holds. Whoever is not gets the answer of one who asks
for what nobody has.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Iterable

import msgspec

from kvd.service.daemon import Daemon
from kvd.service.engines.local_engine import LocalEngine
from kvd.service.errors import RequestRefused
from kvd.service.handlers.forwarding import ask_client, ask_peer, is_ours
from kvd.service.handlers.hosts import knows_engine
from kvd.service.handlers.senders import registered, scheduler_of
from kvd.service.sockets.router import Caller
from kvd.wire.identity import HERE, Endpoint
from kvd.wire.prefix import SCHEME_FACT, CheckPrefix, FindPrefix, PrefixFound, PrefixKept

FIND_SECONDS = 0.25
"""How long a scheduler, or another kvd, is waited for. The one who asks waits less, as a rule."""
NOTHING = PrefixFound()


async def find_prefix(daemon: Daemon, caller: Caller, message: FindPrefix) -> PrefixFound:
    """The longest prefix that an engine which the asker can read from holds, here or elsewhere.

    Raises `RequestRefused` for anyone but the engine's scheduler.
    """
    client = scheduler_of(daemon, caller, message.local_engine)
    asker = daemon.registry.engines[client.engine.engine_id]
    holders: defaultdict[Endpoint, list[str]] = defaultdict(list)
    for (where, engine_id), peer in daemon.handshakes.peers.items():
        facts = peer.card.engine.facts
        if (
            peer.state == "ready"
            and facts.get(SCHEME_FACT) == message.scheme
            and peer.users.get(asker.facts.engine_id) == asker.generation
        ):
            holders[where].append(engine_id)
    neighbours = (daemon.registry.engines.get(name) for name in holders.pop(HERE, ()))
    here = [engine for engine in neighbours if engine is not None and engine.uid == client.uid]
    asked: list[Awaitable[PrefixFound]] = [_ask_scheduler(daemon, engine, message) for engine in here]
    asked += [_ask_kvd(daemon, where, message) for where in holders]
    found = await _longest(asked)
    daemon.counters["prefixes.asked"] += 1
    daemon.counters["prefixes.found"] += found.tokens > 0
    daemon.counters["prefixes.found_tokens"] += found.tokens
    return found


async def peer_find_prefix(daemon: Daemon, caller: Caller, message: FindPrefix) -> PrefixFound:
    """The longest prefix that an engine here holds whose card the asking kvd was given."""
    engines = [
        engine
        for engine_id, engine in daemon.registry.engines.items()
        if engine.facts.facts.get(SCHEME_FACT) == message.scheme and knows_engine(daemon, caller, engine_id)
    ]
    return await _longest(_ask_scheduler(daemon, engine, message) for engine in engines)


async def check_prefix(daemon: Daemon, caller: Caller, message: CheckPrefix) -> PrefixKept:
    """Whether a holder, here or elsewhere, still held what a worker here has read. Raises `RequestRefused`."""
    registered(daemon, caller)
    if is_ours(daemon, message.endpoint):
        return await _check(daemon, message)
    return await ask_peer(
        daemon, message.endpoint, f"the prefix cache of engine {message.engine_id!r}", message, PrefixKept
    )


async def peer_check_prefix(daemon: Daemon, _caller: Caller, message: CheckPrefix) -> PrefixKept:
    """Whether an engine here still held what a worker elsewhere has read. Raises `RequestRefused`."""
    return await _check(daemon, message)


async def _check(daemon: Daemon, message: CheckPrefix) -> PrefixKept:
    engine = daemon.registry.engines.get(message.engine_id)
    if engine is None or engine.scheduler is None or engine.generation != message.generation:
        return PrefixKept(kept=False, reason="that generation of it has ended")
    answer = await ask_client(daemon, engine.scheduler, message, PrefixKept)
    daemon.counters["prefixes.kept" if answer.kept else "prefixes.lost"] += 1
    return answer


async def _ask_scheduler(daemon: Daemon, engine: LocalEngine, message: FindPrefix) -> PrefixFound:
    if engine.scheduler is None or not engine.up or engine.facts.engine_id == message.local_engine:
        return NOTHING
    try:
        found = await ask_client(daemon, engine.scheduler, message, PrefixFound, FIND_SECONDS)
    except RequestRefused:
        return NOTHING
    daemon.counters["prefixes.told"] += found.tokens > 0
    return msgspec.structs.replace(
        found, engine_id=engine.facts.engine_id, generation=engine.generation, endpoint=HERE
    )


async def _ask_kvd(daemon: Daemon, where: Endpoint, message: FindPrefix) -> PrefixFound:
    try:
        found = await ask_peer(daemon, where, "a prefix", message, PrefixFound, FIND_SECONDS)
    except RequestRefused:
        return NOTHING
    return msgspec.structs.replace(found, endpoint=where)


async def _longest(asked: Iterable[Awaitable[PrefixFound]]) -> PrefixFound:
    """The longest of the answers, of equals the first."""
    return max([NOTHING, *await asyncio.gather(*asked)], key=lambda found: found.tokens)
