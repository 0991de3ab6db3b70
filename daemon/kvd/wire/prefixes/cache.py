"""What engines hold in their prefix caches, and what of that others read, as operators see it.

An operator asks a kvd (`ListCaches`, `FindHolders`), and that asks the schedulers of its engines (`GetCache`,
`LookUpTokens`).
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvd.wire.identity import HERE, Endpoint
from kvd.wire.limits import MOST_GROUPS, MOST_ROWS, Count, Id, Text
from kvd.wire.prefix import HASH_BYTES
from kvd.wire.reply import Reply, Request

MOST_TOKENS = 1 << 17
"""Tokens of a prompt that an operator asks for: a scheduler hashes so many within 50 ms."""
MOST_SOURCES = 256
"""Engines by whose names reads are counted, for each that reads."""


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine holds of one KV cache group: blocks that are complete, of so many tokens each."""

    kind: Id
    block_tokens: Count
    blocks: Count


class GetCache(Request, tag="get_cache", frozen=True):
    """kvd to a scheduler: what does its engine hold? Answered by `CacheHeld`."""


class CacheHeld(Reply, tag="cache_held", frozen=True, kw_only=True):
    """What an engine holds. ``pool`` counts the blocks of its cache, of all groups and empty ones too.

    ``untold``: something of it has not been told to kvd yet.
    """

    groups: Annotated[tuple[CacheGroup, ...], Meta(max_length=MOST_GROUPS)] = ()
    pool: Count = 0
    untold: bool = False


class HintsKnown(msgspec.Struct, frozen=True, kw_only=True):
    """The hints of an engine that a kvd knows: so many tags, one for each ``step`` tokens of a prompt."""

    version: Count
    tags: Count
    step: Count


class PrefixesGiven(msgspec.Struct, frozen=True, kw_only=True):
    """What others had of an engine's cache: how often they were told of a prefix, and what their workers read of it.

    ``busy`` counts questions that it turned down, since reads had cost it too much. ``lost`` are reads whose blocks it
    needed meanwhile. ``bytes`` are those of reads that were kept.
    """

    told: Count = 0
    busy: Count = 0
    kept: Count = 0
    lost: Count = 0
    bytes: Count = 0


class PrefixesTaken(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's workers read of another one's cache. ``tokens`` are those of its first worker."""

    source: Id
    reads: Count = 0
    tokens: Count = 0
    bytes: Count = 0
    lost: Count = 0


Taken: TypeAlias = Annotated[tuple[PrefixesTaken, ...], Meta(max_length=MOST_SOURCES + 1)]


class ListCaches(Request, tag="list_caches", frozen=True):
    """An operator: what do the engines here hold, and what is known of others? Answered by `CacheList`."""


class CacheRow(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that shares prefixes, here or (with its ``endpoint``) at another kvd, of which hints alone are known.

    ``trouble`` says why its scheduler did not tell. ``hidden``: it is another user's.
    """

    engine_id: Id
    generation: Id = ""
    endpoint: Endpoint = HERE
    held: CacheHeld | None = None
    hints: HintsKnown | None = None
    given: PrefixesGiven = PrefixesGiven()
    taken: Taken = ()
    trouble: Text = ""
    hidden: bool = False


class CacheList(Reply, tag="caches", frozen=True):
    """The engines that share prefixes, those here first."""

    rows: Annotated[tuple[CacheRow, ...], Meta(max_length=MOST_ROWS)]


class LookUpTokens(Request, tag="look_up_tokens", frozen=True, kw_only=True):
    """How much of a prompt of these tokens is held, or is the block of this hash? Answered by `LookedUp`.

    The engine makes the hashes, as no other process knows how. It is for prompts of plain text without a salt.
    """

    tokens: Annotated[tuple[Count, ...], Meta(max_length=MOST_TOKENS)] = ()
    block_hash: Annotated[bytes, Meta(max_length=HASH_BYTES)] = b""


class LookedUp(Reply, tag="looked_up", frozen=True, kw_only=True):
    """``tokens`` of the prompt are held, in so many blocks by group; of a hash 1 for each group that has its block."""

    tokens: Count = 0
    blocks: Annotated[tuple[Count, ...], Meta(max_length=MOST_GROUPS)] = ()


class FindHolders(LookUpTokens, tag="find_holders", frozen=True, kw_only=True):
    """An operator asks the same of all engines here. Answered by `HolderList`."""


class HolderRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine here holds of it."""

    engine_id: Id
    generation: Id = ""
    found: LookedUp = LookedUp()
    trouble: Text = ""
    hidden: bool = False


class HolderList(Reply, tag="holders", frozen=True):
    """The engines here that share prefixes."""

    rows: Annotated[tuple[HolderRow, ...], Meta(max_length=MOST_ROWS)]
