"""Prefixes: who holds the KV of a prompt's first tokens in its prefix cache, and whether it still held what was read.

No block is kept for a reader. It is told where the blocks are, reads them, and then asks whether none of them was
given to anybody since it was told. Only then may it use what came. So a holder answers at any time, idle or busy, and
a cache that is read by peers evicts, is reset and goes to sleep as if it were not.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from kvd.wire.identity import HERE, Endpoint, ReaderId
from kvd.wire.limits import MOST_BLOCKS, MOST_GROUPS, Blob, Count, Id, Text
from kvd.wire.reply import Reply, Request

SCHEME_FACT = "prefix_hashes"
"""The fact of an engine that shares prefixes: in which way its hashes are made."""
HASH_BYTES = 32
"""Length of a block's hash: vLLM's, by SHA-256."""

GroupIds: TypeAlias = Annotated[
    tuple[Annotated[tuple[Count, ...], Meta(max_length=MOST_BLOCKS)], ...], Meta(max_length=MOST_GROUPS)
]
"""Block ids by KV cache group."""


class FindPrefix(Request, tag="find_prefix", frozen=True, kw_only=True):
    """Who holds more than the first ``beyond`` tokens of a prompt, and at most ``most`` of them?

    From a scheduler to its kvd, from there to other kvds, and from a kvd to the schedulers of its engines.

    ``hashes`` are those of the prompt's blocks of ``hash_tokens`` tokens, one after the other, made in the way that
    ``scheme`` names. ``reader`` names this one read. ``holder``: only that engine is asked. Answered by `PrefixFound`.
    """

    local_engine: Id
    reader: ReaderId
    scheme: Id
    hash_tokens: Count
    hashes: Blob
    most: Count
    beyond: Count = 0
    holder: Id = ""


class PrefixFound(Reply, tag="prefix_found", frozen=True, kw_only=True):
    """``tokens`` of the prompt, held in these blocks; 0: nobody holds more of it, or tells the asker.

    ``blocks`` and ``first_blocks`` are as `kvd.worker.remote.RemotePrefill` has them. ``endpoint`` is the holder's kvd.
    ``busy``: an engine turned the question down, since reads have cost it more than `prefix_cost`. It did not look.
    """

    tokens: Count = 0
    engine_id: Id = ""
    generation: Id = ""
    endpoint: Endpoint = HERE
    blocks: GroupIds = ()
    first_blocks: Annotated[tuple[Count, ...], Meta(max_length=MOST_GROUPS)] = ()
    busy: bool = False


class CheckPrefix(Request, tag="check_prefix", frozen=True, kw_only=True):
    """A worker has read ``bytes`` of what ``reader`` was told of: did the blocks hold it all the time?

    Answered by `PrefixKept`.
    """

    engine_id: Id
    generation: Id
    reader: ReaderId
    endpoint: Endpoint = HERE
    bytes: Count = 0


class PrefixKept(Reply, tag="prefix_kept", frozen=True, kw_only=True):
    """Whether they did: what was read before the question may be used. ``reason`` says why not."""

    kept: bool
    reason: Text = ""
