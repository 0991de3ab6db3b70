"""What the fake daemon says workers hold of their peers, and engines of prefixes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from kvd.geometry.rank import Rank
from kvd.wire.agent import AgentList, AgentRow, Evicted, EvictPeer, HeldPeer, ListAgents
from kvd.wire.frame import Message
from kvd.wire.identity import Endpoint
from kvd.wire.prefixes.cache import (
    CacheGroup,
    CacheHeld,
    CacheList,
    CacheRow,
    FindHolders,
    HintsKnown,
    HolderList,
    HolderRow,
    ListCaches,
    LookedUp,
    PrefixesGiven,
    PrefixesTaken,
)
from kvd.wire.reply import refusal

SINCE = 1_795_000_000.25
LIVE = HeldPeer(
    engine_id="prefill-1",
    generation="91c2d07e",
    use="reads",
    lanes=1,
    workers=2,
    regions=72,
    bytes=67 << 30,
    mapped_bytes=67 << 30,
    loads=1,
    loading_bytes=64 << 20,
)
DEAD = msgspec.structs.replace(LIVE, engine_id="prefill-0", generation="5be0a431", loads=0, loading_bytes=0)
_TP0 = AgentRow(
    engine_id="decode-0", rank=Rank(0), pid=4241, backend="direct", regions=36, registered_bytes=24 << 30
)
_TP1 = msgspec.structs.replace(_TP0, rank=Rank(1), pid=4242)
AGENTS = (
    msgspec.structs.replace(
        _TP0, held=DEAD, state="gone", since=SINCE, reason="the worker sees that its process has ended"
    ),
    msgspec.structs.replace(_TP0, held=LIVE, state="live", since=SINCE),
    msgspec.structs.replace(_TP1, held=LIVE, state="live", since=SINCE),
    msgspec.structs.replace(_TP0, engine_id="decode-1", pid=4300),
)


def _agents(message: Message) -> Message:
    assert isinstance(message, ListAgents)
    found = (
        row
        for row in AGENTS
        if not message.engine_id or (row.held and row.held.engine_id == message.engine_id)
    )
    return AgentList(tuple(found))


def _evict(message: Message) -> Message:
    assert isinstance(message, EvictPeer)
    if message.engine_id == "prefill-1" and not message.force:
        return refusal(
            code="KVD-EVICT-BUSY",
            message="2 loads of prefill-1 are under way at decode-0/tp0, decode-0/tp1",
            hint="try again when they are over, or make them misses with --force: their prompts are computed again",
        )
    before = tuple(row for row in AGENTS if row.held and row.held.engine_id == message.engine_id)
    if not before:
        return refusal(
            code="KVD-EVICT-UNKNOWN",
            message=f"no worker here holds anything of {message.engine_id}; they do of prefill-0, prefill-1",
            hint="`kvctl agents` lists what they hold; it may have been given up meanwhile",
        )
    return Evicted(before=before, left=() if message.carry_out else before, carried_out=message.carry_out)


CACHES = (
    CacheRow(
        engine_id="decode-0",
        generation="0d4a7c11",
        held=CacheHeld(
            groups=(
                CacheGroup(kind="full", block_tokens=16, blocks=41_210),
                CacheGroup(kind="full", block_tokens=16, blocks=512),
            ),
            pool=65_536,
        ),
        hints=HintsKnown(version=812, tags=2_570, step=256),
        given=PrefixesGiven(told=40, kept=76, lost=2, bytes=31 << 30),
        taken=(
            PrefixesTaken(source="prefill-1", reads=16, tokens=120_000, bytes=7 << 30, lost=1),
            PrefixesTaken(source="decode-1", reads=2, tokens=4_096, bytes=256 << 20),
        ),
    ),
    CacheRow(engine_id="decode-1", trouble="decode-1/scheduler did not answer a get_cache within 0.8 s"),
    CacheRow(
        engine_id="prefill-1",
        generation="91c2d07e",
        endpoint=Endpoint("10.0.0.8", 7766),
        hints=HintsKnown(version=4_100, tags=3_980, step=256),
    ),
)


def _holders(message: Message) -> Message:
    assert isinstance(message, FindHolders)
    found = LookedUp(blocks=(1, 0)) if message.block_hash else LookedUp(tokens=2, blocks=(2, 1))
    row = HolderRow(engine_id="decode-0", generation="0d4a7c11", found=found)
    return HolderList((row, HolderRow(engine_id="decode-1", generation="77aa0b1c")))


ANSWERS: Mapping[type, Callable[[Message], Message]] = {
    ListAgents: _agents,
    EvictPeer: _evict,
    ListCaches: lambda _: CacheList(CACHES),
    FindHolders: _holders,
}
