"""Layer-wise push: a decoder announces blocks, a prefiller fills them layer by layer and says which are there.

All but `PushKept` go from worker to worker: to the sender's kvd, from there to the receiver's, from there to the
receiver. They are kept and sent again until they are answered, so a receiver takes each any number of times and in any
order.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvd.geometry.rank import Rank
from kvd.wire.identity import Endpoint
from kvd.wire.limits import (
    MOST_BLOCKS,
    MOST_GROUPS,
    MOST_LAYERS,
    Blob,
    Count,
    Id,
    Seconds,
    Spans,
    Text,
    TraceParent,
)
from kvd.wire.reply import Request
from kvd.wire.transfer import BlockRuns

MOST_THERE = 4096
"""Layers, or groups of them, that one word of progress names."""
PACKED_BYTES = 3
"""Of an id that is packed: 16 million blocks, some 270 million tokens. A million tokens in 20 groups of 16 fit."""


class BlockRun(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one KV cache group: ``ids[i]`` covers the request's block number ``first + i``.

    If the ids of all groups would be too many for a message, there are none. Instead there are ``runs`` of neighbours:
    (first id, how many). If few are neighbours, there are ids ``packed`` into `PACKED_BYTES` each, the lowest first.
    """

    group: Count
    first: Count
    ids: Annotated[tuple[Count, ...], Meta(max_length=MOST_BLOCKS)]
    runs: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MOST_BLOCKS)] = ()
    packed: Annotated[bytes, Meta(max_length=PACKED_BYTES * MOST_BLOCKS)] = b""

    @property
    def count(self) -> int:
        """How many blocks they are."""
        return len(self.ids) + sum(count for _, count in self.runs) + len(self.packed) // PACKED_BYTES


class PushKey(msgspec.Struct, frozen=True, kw_only=True):
    """Names one decoding worker's part of one transfer.

    ``transfer_id`` is the router's, the same on both sides. ``attempt`` counts up when the worker announces anew: what
    belongs to an older attempt is over. ``decoder_endpoint`` is filled in by the decoder's kvd.
    """

    transfer_id: Id
    prefiller: Id
    prefiller_endpoint: Endpoint
    decoder: Id
    rank: Rank
    attempt: Count = 0
    decoder_endpoint: Endpoint = Endpoint()


class PushAnnounce(Request, tag="push_announce", frozen=True, kw_only=True):
    """A decoding worker to all workers of the prefilling engine: these are the blocks for that transfer.

    ``generations`` are the prefiller's and the decoder's. ``tokens`` are to be there in the end, the first
    ``computed`` of them are already. ``digest`` is of the decoder's prompt under the prefiller's key: where that is not
    the digest of what is computed nothing is written. ``window`` is what the backend's window exported; where it is
    empty the decoder reads by itself what it is told of. ``seconds`` from now the decoder gives up. Answered by `Ok`
    once every worker has it.
    """

    key: PushKey
    generations: tuple[Id, Id]
    tokens: Count
    computed: Count
    blocks: Annotated[tuple[BlockRun, ...], Meta(max_length=MOST_GROUPS)]
    window: Blob = msgspec.field(name="landing")
    seconds: Seconds
    digest: Id = ""


class PushWithdraw(Request, tag="push_withdraw", frozen=True, kw_only=True):
    """A decoding worker to all workers of the prefilling engine: write no more.

    Answered by `Ok` once every worker has it. Each of them says by a `PushProgress` with ``quiesced`` when none of its
    writes is under way any more; also one that never heard of the transfer. ``generation`` is the prefiller's as it
    was announced to: workers of another one cannot speak for it. Empty: of any.
    """

    key: PushKey
    generation: Id = ""


class LayersThere(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of one group whose KV is complete as far as the sender supplies it.

    Where the decoder reads by itself: readable up to ``tokens``, in these blocks of the prefiller's. Once it has been
    told of everything they are kept until it withdraws or is done; before that it hears if they are lost.
    """

    group: Count
    layers: Annotated[tuple[Id, ...], Meta(max_length=MOST_LAYERS)]
    tokens: Count
    blocks: BlockRun | None = None


class SentPart(msgspec.Struct, frozen=True, kw_only=True):
    """A prefilling worker's part of a push, for the spans of its own kvd: no other one is sent it.

    ``started`` is Unix time, when the announcement came; ``moments`` are ``first`` and ``last`` (of what was sent) and
    ``ended``, in seconds after it.
    """

    traceparent: TraceParent
    request_id: Id
    started: Seconds
    moments: Spans = {}


class PushProgress(Request, tag="push_progress", frozen=True, kw_only=True):
    """A prefilling worker to one decoding worker: layers are there, or it failed, or nothing is under way any more.

    ``failed`` is the cause, ``code`` that of `kvd.wire.miss`. Without ``quiesced`` beside it something may still land,
    and no other word follows: the decoder has to close its window. ``blocks`` are the request's on the sender's side,
    for the ledger, once all that it supplies is there; left out where they lie in more than `MAX_RUNS` runs. ``sums``:
    it has checksums of them (`kvd.wire.checksum`). ``sent`` comes with its last word where the request belongs to a
    trace. Answered by `Ok`; one that nobody waits for is no error.
    """

    key: PushKey
    source: Rank
    there: Annotated[tuple[LayersThere, ...], Meta(max_length=MOST_THERE)] = ()
    failed: Text = ""
    code: Id = ""
    quiesced: bool = msgspec.field(default=False, name="quiet")
    blocks: Annotated[tuple[BlockRuns, ...], Meta(max_length=MOST_GROUPS)] = ()
    sums: bool = False
    sent: SentPart | None = None


class PushDone(Request, tag="push_done", frozen=True, kw_only=True):
    """A decoding worker to all workers of the prefilling engine: it has everything; the blocks are its no longer.

    Answered by `Ok` once every worker has it. Sent where the decoder reads by itself.
    """

    key: PushKey


class PushKept(Request, tag="push_kept", frozen=True, kw_only=True):
    """A prefilling scheduler to the workers of its engine: a pushed request is complete, and its blocks stay.

    ``blocks`` are of the groups whose blocks are known last: states. With its next step it says so again; this is
    sooner. kvd hands it on unasked, to the workers of its host. Answered by `Ok`.
    """

    engine_id: Id
    transfer_id: Id
    request_id: Id
    blocks: Annotated[tuple[BlockRun, ...], Meta(max_length=MOST_GROUPS)] = ()


PushMessage: TypeAlias = PushAnnounce | PushWithdraw | PushDone | PushProgress
"""What goes from one engine's worker to another's."""
