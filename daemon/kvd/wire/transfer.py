"""Transfers: what workers report for the ledger, and what operators ask of it."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvd.wire.identity import EngineFacts
from kvd.wire.limits import (
    LONGEST_ID,
    MOST_GROUPS,
    MOST_RANKS,
    MOST_RECORDS,
    MOST_ROWS,
    Blob,
    Count,
    Id,
    Seconds,
    Spans,
    Text,
    TraceParent,
    Whole,
)
from kvd.wire.reply import Reply, Request

TransferState = Literal["done", "miss"]
Order = Literal["newest", "slowest", "largest"]
MAX_RUNS = 4096
"""Runs of blocks that a record keeps for each side, of all groups together: 32 KB on the wire at most."""
MAX_CAUSE = 2000
"""Characters of a cause that a record keeps."""
SCHEDULER_RANK = "scheduler"
"""Stands for the rank in the record of a miss of which only the scheduler knows: no load was ordered."""


class BlockRuns(msgspec.Struct, frozen=True, array_like=True):
    """One side's blocks of one group, as runs of neighbours: (first id, how many).

    The first id covers the tokens of the request's block number ``first``; of a state group that has no meaning.
    """

    group: Count
    first: Count
    runs: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MAX_RUNS)]


GroupBlocks: TypeAlias = Annotated[tuple[BlockRuns, ...], Meta(max_length=MOST_GROUPS)]
"""One side's blocks of all groups."""


class GroupShare(msgspec.Struct, frozen=True):
    """What one transfer moved of one KV cache group: blocks and bytes on this worker."""

    group: Count
    kind: Id
    blocks: Count
    bytes: Count


class GroupChecksum(msgspec.Struct, frozen=True):
    """What of one KV cache group was compared: so many layers; ``differs`` names the first that is not the same."""

    group: Count
    layers: Count
    differs: Id = ""


class ChecksumResult(msgspec.Struct, frozen=True, kw_only=True):
    """The prefiller's sums of what it handed over against the decoder's of what it has.

    ``why`` says why it is ``unknown``; the state is empty where nothing was to be compared. ``seconds`` are from the
    end of the load to the end of the comparison.
    """

    state: Literal["", "ok", "differs", "unknown"] = ""
    why: Text = ""
    groups: Annotated[tuple[GroupChecksum, ...], Meta(max_length=MOST_GROUPS)] = ()
    seconds: Seconds = 0.0


OTHER = "other"
"""The stage that stands for the time between the others."""


class TransferRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part of moving one request's KV.

    ``started`` is Unix time in seconds. Stages are durations in seconds, measured on the worker's monotonic clock, in
    the order in which they happen. Those of a pull are ``queued`` (scheduler's claim to the worker's start),
    ``handshake``, ``plan``, ``post`` and ``wire`` (end of posting to last completion). They do not overlap; an engine
    that copies while it posts shows that time as ``post``. Of a load in pieces ``plan`` is the first one's; the others
    are planned between posts, and count as ``post``. Those of a push are ``queued``, ``handshake``, ``announce`` (until
    the prefiller has acknowledged), ``wait`` (until the first layer is there) and ``wire`` (until the last one is).
    Most of that time is the prefiller's computing. The last one, ``other``, is what passed between these, with attempts
    that failed: all stages together are what the load took. Records of older workers have none. ``bytes`` counts every
    byte that a descriptor names once; ``coalesced_descriptors`` is 0 where the prefiller writes, since only it knows.

    ``moments`` say when things happened, in seconds after ``started`` on the same clock; what did not happen is not
    there. They are ``queued`` (the scheduler's claim, so below zero), ``handshake`` (the peer was known), ``planned``
    (the first piece), ``posting``, ``posted``, ``first`` and ``last`` (completions), ``reported``, and of a push
    ``announced`` and ``taken``. ``attempts`` counts lanes that were tried, or announcements. ``cause`` says in words
    why a miss is one, ``code`` in one of `kvd.wire.miss`. The blocks are those of this worker and of the engine that it
    has the KV from; ``remote_blocks`` is empty where it never learned them (pushes that missed). ``local_generation``
    is filled in by kvd where a worker left it empty, and ``uid``, the user of the process that reported it (-1: not
    known), always. ``traceparent`` is of the request whose KV it is. ``prefix``: it was read from what the remote
    engine holds in its prefix cache, which kept nothing for it.
    """

    transfer_id: Id
    request_id: Id
    local_engine: Id
    local_rank: Id
    remote_engine: Id
    remote_generation: Id
    remote_request_id: Id
    backend: Id
    mode: Literal["pull", "push"]
    state: TransferState
    cause: Text = ""
    code: Id = ""
    started: Seconds = 0.0
    tokens: Count = 0
    bytes: Count = 0
    descriptors: Count = 0
    coalesced_descriptors: Count = 0
    remote_ranks: Annotated[tuple[Id, ...], Meta(max_length=MOST_RANKS)] = ()
    groups: Annotated[tuple[GroupShare, ...], Meta(max_length=MOST_GROUPS)] = ()
    stages: Spans = {}
    local_generation: Id = ""
    attempts: Count = 1
    local_blocks: GroupBlocks = ()
    remote_blocks: GroupBlocks = ()
    blocks_cut: bool = False
    moments: Spans = {}
    checksum: ChecksumResult = ChecksumResult()
    uid: Whole = -1
    traceparent: TraceParent = ""
    prefix: bool = False


def bounded(record: TransferRecord) -> TransferRecord:
    """The record with no more than `MAX_RUNS` runs of blocks on either side and `MAX_CAUSE` characters of cause.

    ``blocks_cut`` says that some were left out. Ids that are too long are cut, and stay apart by a digest at their end.
    """
    record = _with_short_ids(record)
    local, remote = _first_runs(record.local_blocks), _first_runs(record.remote_blocks)
    if local is record.local_blocks and remote is record.remote_blocks and len(record.cause) <= MAX_CAUSE:
        return record
    cut = record.blocks_cut or local is not record.local_blocks or remote is not record.remote_blocks
    return msgspec.structs.replace(
        record, local_blocks=local, remote_blocks=remote, blocks_cut=cut, cause=record.cause[:MAX_CAUSE]
    )


def _with_short_ids(record: TransferRecord) -> TransferRecord:
    ids = {name: getattr(record, name) for name in ("transfer_id", "request_id", "remote_request_id")}
    long = {name: _short(text) for name, text in ids.items() if len(text) > LONGEST_ID}
    return msgspec.structs.replace(record, **long) if long else record


def _short(name: str) -> str:
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{name[: LONGEST_ID - len(digest) - 3]}...{digest}"


def _first_runs(blocks: tuple[BlockRuns, ...]) -> tuple[BlockRuns, ...]:
    if sum(len(part.runs) for part in blocks) <= MAX_RUNS:
        return blocks
    left, kept = MAX_RUNS, []
    for part in blocks:
        kept.append(BlockRuns(part.group, part.first, part.runs[:left]))
        left -= len(kept[-1].runs)
    return tuple(kept)


class ReportTransfers(Request, tag="report_transfers", frozen=True, kw_only=True):
    """A worker's finished transfers, or misses that only the scheduler knows (`SCHEDULER_RANK`).

    Answered by `Ok` once they are on disk; kept and sent again until then.
    """

    incarnation: Id
    records: Annotated[tuple[TransferRecord, ...], Meta(max_length=MOST_RECORDS)]


class ListTransfers(Request, tag="list_transfers", frozen=True, kw_only=True):
    """The first ``limit`` transfers in ``order`` that match all given filters. Answered by `TransferList`.

    ``after`` and ``before`` are ledger sequence numbers: only later ones, only earlier ones (0: all). ``engine_id`` is
    either side, ``peer`` the other side of it, or the remote one when given alone. ``any_id`` is that of a transfer or
    a request on either side, or a sequence number. ``within`` is the age in seconds of the oldest that counts,
    ``slower_than`` the time in seconds that all stages together must exceed. ``code`` is that of a miss. Block ids come
    only with ``blocks``.
    """

    limit: Count = 50
    after: Count = 0
    before: Count = 0
    request_id: Id = ""
    engine_id: Id = ""
    peer: Id = ""
    any_id: Id = ""
    state: Id = ""
    code: Id = ""
    backend: Id = ""
    mode: Id = ""
    within: Seconds = 0.0
    slower_than: Seconds = 0.0
    order: Order = "newest"
    blocks: bool = False


class LedgerRow(msgspec.Struct, frozen=True):
    """A record with its sequence number in the ledger, and the Unix time at which it came there."""

    seq: Count
    record: TransferRecord
    recorded: Seconds = 0.0


class TransferList(Reply, tag="transfers", frozen=True, kw_only=True):
    """Rows of the ledger in the order asked for; ``total`` counts all it holds.

    ``more``: further ones match, beyond the limit or beyond what one answer may hold; ask again with ``before``. Of
    ``hidden`` others the asker may see nothing, since they are of other users' engines, nor whether they match.
    """

    rows: Annotated[tuple[LedgerRow, ...], Meta(max_length=MOST_ROWS)]
    total: Count
    more: bool = False
    hidden: Count = 0


class GetKeptEngine(Request, tag="get_kept_engine", frozen=True, kw_only=True):
    """What the ledger keeps of an engine's generation that records name. Answered by `KeptEngine` or `Refused`."""

    engine_id: Id
    generation: Id


class KeptEngine(Reply, tag="kept_engine", frozen=True, kw_only=True):
    """One generation of an engine as its workers described it: for each what `codec.encode_worker` made."""

    engine: EngineFacts
    generation: Id
    geometries: Annotated[tuple[Blob, ...], Meta(max_length=MOST_RANKS)]
