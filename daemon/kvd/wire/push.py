"""Layer-wise push: a decoder announces blocks, a prefiller fills them layer by layer and says which are there.

All three go from worker to worker: to the sender's kvd, from there to the receiver's, from there to the receiver. They
are kept and sent again until they are answered, so a receiver takes each any number of times and in any order.
"""

from __future__ import annotations

import msgspec

from kvd.geometry.rank import Rank
from kvd.wire.identity import Endpoint
from kvd.wire.reply import Request
from kvd.wire.transfer import BlockRuns


class BlockRun(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one KV cache group: ``ids[i]`` covers the request's block number ``first + i``."""

    group: int
    first: int
    ids: tuple[int, ...]


class PushKey(msgspec.Struct, frozen=True, kw_only=True):
    """Names one decoding worker's part of one transfer.

    ``transfer_id`` is the router's, the same on both sides. ``attempt`` counts up when the worker announces anew: what
    belongs to an older attempt is over. ``decoder_endpoint`` is filled in by the decoder's kvd.
    """

    transfer_id: str
    prefiller: str
    prefiller_endpoint: Endpoint
    decoder: str
    rank: Rank
    attempt: int = 0
    decoder_endpoint: Endpoint = Endpoint()


class PushAnnounce(Request, tag="push_announce", frozen=True, kw_only=True):
    """A decoding worker to all workers of the prefilling engine: these are the blocks for that transfer.

    ``generations`` are the prefiller's and the decoder's. ``tokens`` are to be there in the end, the first
    ``computed`` of them are already. ``digest`` is of the decoder's prompt under the prefiller's key: where that is not
    the digest of what is computed nothing is written. ``landing`` is what the backend's window exported; where it is
    empty the decoder reads by itself what it is told of. ``seconds`` from now the decoder gives up. Answered by `Ok`
    once every worker has it.
    """

    key: PushKey
    generations: tuple[str, str]
    tokens: int
    computed: int
    blocks: tuple[BlockRun, ...]
    landing: bytes
    seconds: float
    digest: str = ""


class PushWithdraw(Request, tag="push_withdraw", frozen=True, kw_only=True):
    """A decoding worker to all workers of the prefilling engine: write no more.

    Answered by `Ok` once every worker has it. Each of them says by a `PushProgress` with ``quiet`` when none of its
    writes is under way any more; also one that never heard of the transfer. ``generation`` is the prefiller's as it
    was announced to: workers of another one cannot speak for it. Empty: of any.
    """

    key: PushKey
    generation: str = ""


class LayersThere(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of one group whose KV is complete as far as the sender supplies it.

    Where the decoder reads by itself: readable up to ``tokens``, in these blocks of the prefiller's, which are kept
    until the decoder withdraws or is done.
    """

    group: int
    layers: tuple[str, ...]
    tokens: int
    blocks: BlockRun | None = None


class PushProgress(Request, tag="push_progress", frozen=True, kw_only=True):
    """A prefilling worker to one decoding worker: layers are there, or it failed, or nothing is under way any more.

    ``failed`` is the cause, ``code`` that of `kvd.wire.miss`. Without ``quiet`` beside it something may still land, and
    no other word follows: the decoder has to close its window. ``blocks`` are the request's on the sender's side, for
    the ledger, once all that it supplies is there; left out where they lie in more than `MAX_RUNS` runs. ``sums``: it
    has checksums of them (`kvd.wire.checksum`). Answered by `Ok`; one that nobody waits for is no error.
    """

    key: PushKey
    source: Rank
    there: tuple[LayersThere, ...] = ()
    failed: str = ""
    code: str = ""
    quiet: bool = False
    blocks: tuple[BlockRuns, ...] = ()
    sums: bool = False


class PushDone(Request, tag="push_done", frozen=True, kw_only=True):
    """A decoding worker to all workers of the prefilling engine: it has everything; the blocks are its no longer.

    Answered by `Ok` once every worker has it. Sent where the decoder reads by itself.
    """

    key: PushKey
