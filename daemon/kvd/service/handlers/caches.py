"""What the engines here hold in their prefix caches, as operators see it, and who of them holds a prompt."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from kvd.service.daemon import Daemon
from kvd.service.engines.local_engine import LocalEngine
from kvd.service.errors import RequestRefused
from kvd.service.handlers.forwarding import ask_client
from kvd.service.handlers.sight import sight_of
from kvd.service.prefixes.hints import Hint
from kvd.service.sockets.router import Caller
from kvd.wire.identity import HERE
from kvd.wire.prefix import SCHEME_FACT
from kvd.wire.prefixes.cache import (
    CacheHeld,
    CacheList,
    CacheRow,
    FindHolders,
    GetCache,
    HintsKnown,
    HolderList,
    HolderRow,
    ListCaches,
    LookedUp,
    LookUpTokens,
    PrefixesGiven,
)

Answer = TypeVar("Answer", CacheHeld, LookedUp)

TELL_SECONDS = 0.8
"""How long a scheduler is waited for: less than kvctl gives a host of a fleet, so that one of them hides no others."""


async def list_caches(daemon: Daemon, caller: Caller, _query: ListCaches) -> CacheList:
    """What each engine here holds, and the hints of the others that are known."""
    sight = await sight_of(daemon, caller)
    engines = _sharing(daemon)
    seen = [engine for engine in engines if sight.of(engine.uid)]
    answers = await asyncio.gather(*(_told(daemon, engine, GetCache(), CacheHeld) for engine in seen))
    rows = [_row(daemon, engine, answer) for engine, answer in zip(seen, answers, strict=True)]
    rows += [CacheRow(engine_id=one.facts.engine_id, hidden=True) for one in engines if one not in seen]
    others = [
        CacheRow(engine_id=name, generation=hint.of, endpoint=where, hints=_known(hint))
        for (where, name), hint in daemon.hints.rows()
        if where != HERE
    ]
    rows.sort(key=lambda row: row.engine_id)
    others.sort(key=lambda row: (row.engine_id, str(row.endpoint)))
    return CacheList((*rows, *others))


async def find_holders(daemon: Daemon, caller: Caller, message: FindHolders) -> HolderList:
    """What each engine here holds of a prompt, or whether it holds a block."""
    sight = await sight_of(daemon, caller)
    engines = _sharing(daemon)
    seen = [engine for engine in engines if sight.of(engine.uid)]
    question = LookUpTokens(tokens=message.tokens, block_hash=message.block_hash)
    answers = await asyncio.gather(*(_told(daemon, engine, question, LookedUp) for engine in seen))
    rows = []
    for engine, answer in zip(seen, answers, strict=True):
        row = HolderRow(engine_id=engine.facts.engine_id, generation=engine.generation)
        told = {"trouble": answer} if isinstance(answer, str) else {"found": answer}
        rows.append(msgspec.structs.replace(row, **told))
    rows += [HolderRow(engine_id=one.facts.engine_id, hidden=True) for one in engines if one not in seen]
    return HolderList(tuple(sorted(rows, key=lambda row: row.engine_id)))


def _sharing(daemon: Daemon) -> list[LocalEngine]:
    return [
        engine
        for engine in daemon.registry.engines.values()
        if engine.up and engine.facts.facts.get(SCHEME_FACT)
    ]


def _row(daemon: Daemon, engine: LocalEngine, answer: CacheHeld | str) -> CacheRow:
    name, scheduler = engine.facts.engine_id, engine.scheduler
    hint = daemon.hints.get((HERE, name), scheduler.incarnation) if scheduler is not None else None
    return CacheRow(
        engine_id=name,
        generation=engine.generation,
        held=None if isinstance(answer, str) else answer,
        hints=_known(hint) if hint is not None else None,
        given=daemon.prefix_counts.given.get(name, PrefixesGiven()),
        taken=daemon.prefix_counts.taken(name),
        trouble=answer if isinstance(answer, str) else "",
    )


def _known(hint: Hint) -> HintsKnown:
    return HintsKnown(version=hint.version, tags=len(hint.tags), step=hint.step)


async def _told(
    daemon: Daemon, engine: LocalEngine, message: GetCache | LookUpTokens, kind: type[Answer]
) -> Answer | str:
    """What its scheduler tells, or why it does not."""
    if engine.scheduler is None:
        return "its scheduler has gone"
    try:
        return await ask_client(daemon, engine.scheduler, message, kind, TELL_SECONDS)
    except RequestRefused as refusal:
        if refusal.code == "KVD-NOT-TAKEN":
            return "its connector is of an earlier version, and does not tell"
        return refusal.message
