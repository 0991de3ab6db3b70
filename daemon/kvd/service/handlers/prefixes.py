"""Prefixes: who holds one, asked of the engines here and of other kvds; and whether a holder still held what was read.

Only an engine that was given a holder's card is told of what that holds. Whoever is not gets the answer of one who asks
for what nobody has. Of the holders only those are asked that hold enough by their hints (`kvd.service.prefixes`).
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from kvd.service.daemon import Daemon
from kvd.service.engines.local_engine import Client, LocalEngine
from kvd.service.errors import RequestRefused
from kvd.service.handlers.forwarding import ask_client, ask_peer, is_ours
from kvd.service.handlers.hosts import knows_engine
from kvd.service.handlers.pages import whose
from kvd.service.handlers.senders import registered, scheduler_of
from kvd.service.prefixes.hints import Hint
from kvd.service.prefixes.tags import PromptTags
from kvd.service.slices import paced
from kvd.service.sockets.router import Caller
from kvd.wire.identity import HERE, Endpoint
from kvd.wire.prefix import SCHEME_FACT, CheckPrefix, FindPrefix, PrefixFound, PrefixKept

FIND_SECONDS = 0.25
"""How long a scheduler, or another kvd, is waited for. The one who asks waits less, as a rule."""
NEXT_SECONDS = 0.02
"""After so long without an answer the next holder is asked as well."""
MOST_HOLDERS = 4
"""Holders that are asked, one after the other, because of their hints."""
NOTHING = PrefixFound()
UNTOLD = PrefixKept(kept=False, reason="nobody was told of a prefix there under that name")
"""What whoever was not given the holder's card is answered: the holder is not asked."""


class _Hinted(NamedTuple):
    """An engine that holds so many tokens of the prompt by its hint. Of equals those of this host come first."""

    tokens: int
    near: bool
    where: Endpoint
    engine_id: str


async def find_prefix(daemon: Daemon, caller: Caller, message: FindPrefix) -> PrefixFound:
    """The longest prefix that an engine which the asker can read from holds, here or elsewhere.

    Raises `RequestRefused` for anyone but the engine's scheduler.
    """
    client = scheduler_of(daemon, caller, message.local_engine)
    asker = daemon.registry.engines[client.engine.engine_id]
    prompt = PromptTags(message.hashes, message.hash_tokens)
    hinted: list[_Hinted] = []
    unknown: set[tuple[Endpoint, str]] = set()
    async with daemon.prefix_questions.turn(whose(caller)):
        async for where, engine_id, hint in paced(_readable(daemon, client, asker, message.scheme)):
            if hint is None:
                # One question reaches all engines of another kvd.
                unknown.add((where, engine_id if where == HERE else ""))
            elif (held := hint.held(prompt)) and held + hint.step > message.beyond:
                hinted.append(_Hinted(held, where == HERE, where, engine_id))
        await asyncio.sleep(0)
    whole = {where for where, _ in unknown if where != HERE}
    for where in whole:
        daemon.followers.follow(where)
    found = await _best(daemon, message, [one for one in hinted if one.where not in whole], unknown)
    daemon.counters["prefixes.asked"] += 1
    daemon.counters["prefixes.found"] += found.tokens > 0
    daemon.counters["prefixes.found_tokens"] += found.tokens
    return found


async def peer_find_prefix(daemon: Daemon, caller: Caller, message: FindPrefix) -> PrefixFound:
    """The longest prefix that an engine here holds whose card the asking kvd was given."""
    message = msgspec.structs.replace(message, reader=_reader(caller, message.reader))
    engines = [
        engine
        for engine_id, engine in daemon.registry.engines.items()
        if message.holder in ("", engine_id)
        and engine.facts.facts.get(SCHEME_FACT) == message.scheme
        and knows_engine(daemon, caller, engine_id)
    ]
    return _longest(await asyncio.gather(*(_ask_scheduler(daemon, engine, message) for engine in engines)))


async def check_prefix(daemon: Daemon, caller: Caller, message: CheckPrefix) -> PrefixKept:
    """Whether a holder, here or elsewhere, still held what a worker here has read. Raises `RequestRefused`."""
    client = registered(daemon, caller)
    if is_ours(daemon, message.endpoint):
        engine = daemon.registry.engines.get(message.engine_id)
        return await _check(daemon, message) if engine is None or engine.uid == client.uid else UNTOLD
    return await ask_peer(
        daemon, message.endpoint, f"the prefix cache of engine {message.engine_id!r}", message, PrefixKept
    )


async def peer_check_prefix(daemon: Daemon, caller: Caller, message: CheckPrefix) -> PrefixKept:
    """Whether an engine here still held what a worker elsewhere has read. Raises `RequestRefused`."""
    if not knows_engine(daemon, caller, message.engine_id):
        return UNTOLD
    return await _check(daemon, msgspec.structs.replace(message, reader=_reader(caller, message.reader)))


async def _check(daemon: Daemon, message: CheckPrefix) -> PrefixKept:
    engine = daemon.registry.engines.get(message.engine_id)
    if engine is None or engine.scheduler is None or engine.generation != message.generation:
        return PrefixKept(kept=False, reason="that generation of it has ended")
    answer = await ask_client(daemon, engine.scheduler, message, PrefixKept)
    daemon.counters["prefixes.kept" if answer.kept else "prefixes.lost"] += 1
    if daemon.registry.engines.get(message.engine_id) is engine:  # else it was forgotten meanwhile
        daemon.prefix_counts.read(message.engine_id, message.bytes, kept=answer.kept)
    return answer


def _reader(caller: Caller, reader: str) -> str:
    """A reader's name as engines here are told it: another host may know a reader's name, and gets one of its own.

    A holder goes by the name. A host that asked under another's would have it vouch for what that one did not read.
    """
    named = hashlib.blake2b(reader.encode(), key=caller.key, digest_size=16)
    return named.hexdigest() if caller.key else reader


def _readable(
    daemon: Daemon, client: Client, asker: LocalEngine, scheme: str
) -> Iterator[tuple[Endpoint, str, Hint | None]]:
    """The engines that the asker may read from, with what is known of them.

    In a large fleet to look at all hints takes some 20 ms. So others have their turns in between.
    """
    for (where, engine_id), peer in list(daemon.handshakes.peers.items()):
        if (
            peer.state != "ready"
            or peer.card.engine.facts.get(SCHEME_FACT) != scheme
            or peer.users.get(asker.facts.engine_id) != asker.generation
        ):
            continue
        of = peer.card.generation
        if where == HERE:
            engine = daemon.registry.engines.get(engine_id)
            if engine is None or engine.uid != client.uid or engine.scheduler is None:
                continue
            of = engine.scheduler.incarnation
        yield where, engine_id, daemon.hints.get((where, engine_id), of)


async def _best(
    daemon: Daemon, message: FindPrefix, hinted: list[_Hinted], unknown: set[tuple[Endpoint, str]]
) -> PrefixFound:
    """The longest prefix that anybody answers.

    Whoever tells no hints is asked at once. The others are asked in turn, from the longest on, until somebody has
    answered with at least as much as all that are left hold by their hints. Of equals any may be the first.
    """
    asking = [_ask(daemon, where, engine_id, message) for where, engine_id in sorted(unknown, key=str)]
    pending = [asyncio.ensure_future(one) for one in asking]
    best = NOTHING
    random.shuffle(hinted)
    hinted.sort(key=lambda one: one[:2], reverse=True)
    for tokens, _, where, engine_id in hinted[:MOST_HOLDERS]:
        if best.tokens >= tokens and best.tokens > message.beyond:
            break
        question = msgspec.structs.replace(message, holder=engine_id)
        task = asyncio.ensure_future(_hinted(daemon, where, engine_id, question))
        await asyncio.wait({task}, timeout=NEXT_SECONDS)
        pending.append(task)
        best = _longest([best, *(one.result() for one in pending if one.done())])
        pending = [one for one in pending if not one.done()]
    return _longest([best, *await asyncio.gather(*pending)])


async def _hinted(daemon: Daemon, where: Endpoint, engine_id: str, message: FindPrefix) -> PrefixFound:
    """The answer of an engine whose hint says that it holds enough; where it does not the question was wasted."""
    found = await _ask(daemon, where, engine_id, message)
    daemon.counters["prefixes.questions"] += 1
    daemon.counters["prefixes.questions_wasted"] += found.tokens == 0 and not found.busy
    return found


def _ask(daemon: Daemon, where: Endpoint, engine_id: str, message: FindPrefix) -> Awaitable[PrefixFound]:
    engine = daemon.registry.engines.get(engine_id) if where == HERE else None
    return _ask_kvd(daemon, where, message) if where != HERE else _ask_scheduler(daemon, engine, message)


async def _ask_scheduler(daemon: Daemon, engine: LocalEngine | None, message: FindPrefix) -> PrefixFound:
    if (
        engine is None
        or engine.scheduler is None
        or not engine.up
        or engine.facts.engine_id == message.local_engine
    ):
        return NOTHING
    try:
        found = await ask_client(daemon, engine.scheduler, message, PrefixFound, FIND_SECONDS)
    except RequestRefused:
        return NOTHING
    if found.busy or found.tokens:
        _note_answer(daemon, engine, found)
    return msgspec.structs.replace(
        _believed(daemon, message, found),
        engine_id=engine.facts.engine_id,
        generation=engine.generation,
        endpoint=HERE,
    )


def _note_answer(daemon: Daemon, engine: LocalEngine, found: PrefixFound) -> None:
    """An engine told of a prefix, or turned the question down."""
    engine_id = engine.facts.engine_id
    if daemon.registry.engines.get(engine_id) is engine:  # else it was forgotten meanwhile
        daemon.counters["prefixes.told" if found.tokens else "prefixes.busy"] += 1
        daemon.prefix_counts.answered(engine_id, busy=not found.tokens)


async def _ask_kvd(daemon: Daemon, where: Endpoint, message: FindPrefix) -> PrefixFound:
    try:
        found = await ask_peer(daemon, where, "a prefix", message, PrefixFound, FIND_SECONDS)
    except RequestRefused:
        return NOTHING
    if found.tokens and not _may_read(daemon, message, where, found):
        daemon.counters["prefixes.answers_untrue"] += 1
        return NOTHING
    return msgspec.structs.replace(_believed(daemon, message, found), endpoint=where)


def _may_read(daemon: Daemon, message: FindPrefix, where: Endpoint, found: PrefixFound) -> bool:
    """Whether a kvd names an engine that was asked for: one of that name elsewhere would lose its place to it."""
    asker = daemon.registry.engines.get(message.local_engine)
    peer = daemon.handshakes.peers.get((where, found.engine_id))
    return (
        message.holder in ("", found.engine_id)
        and asker is not None
        and peer is not None
        and peer.state == "ready"
        and peer.card.generation == found.generation
        and peer.users.get(message.local_engine) == asker.generation
    )


def _believed(daemon: Daemon, message: FindPrefix, found: PrefixFound) -> PrefixFound:
    """An answer, or that of one who holds nothing: of more tokens than were asked for it would be the longest."""
    if message.beyond < found.tokens <= message.most:
        return msgspec.structs.replace(found, busy=False)
    daemon.counters["prefixes.answers_untrue"] += found.tokens > 0
    return PrefixFound(busy=found.busy)


def _longest(answers: Iterable[PrefixFound]) -> PrefixFound:
    """The longest of the answers, of equals the first; where there is none, one of an engine that is busy."""
    return max([NOTHING, *answers], key=lambda found: (found.tokens, found.busy))
