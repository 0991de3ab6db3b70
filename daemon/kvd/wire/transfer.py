"""Transfers: what workers report for the ledger, and what operators ask of it."""

from __future__ import annotations

from typing import Literal

import msgspec

TransferState = Literal["done", "miss"]


class GroupShare(msgspec.Struct, frozen=True):
    """What one transfer moved of one KV cache group: blocks and bytes on this worker."""

    group: int
    kind: str
    blocks: int
    bytes: int


class TransferRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part of moving one request's KV.

    ``started`` is Unix time in seconds; stages are durations in seconds measured on the worker's monotonic
    clock, in the order in which they happen: ``queued`` (scheduler's claim to the worker's start),
    ``handshake``, ``plan``, ``post``, ``wire`` (end of posting to last completion). They do not overlap; an
    engine that copies while it posts shows that time as ``post``. Of a push they are ``queued``,
    ``handshake``, ``announce`` (until the prefiller has acknowledged), ``wait`` (until the first layer is
    there) and ``wire`` (until the last one is): most of it is the prefiller's computing. ``bytes`` counts every
    byte that a descriptor names once; ``coalesced_descriptors`` is 0 where the prefiller writes, since only it
    knows.
    """

    transfer_id: str
    request_id: str
    local_engine: str
    local_rank: str
    remote_engine: str
    remote_generation: str
    remote_request_id: str
    backend: str
    mode: Literal["pull", "push"]
    state: TransferState
    cause: str = ""
    started: float = 0.0
    tokens: int = 0
    bytes: int = 0
    descriptors: int = 0
    coalesced_descriptors: int = 0
    remote_ranks: tuple[str, ...] = ()
    groups: tuple[GroupShare, ...] = ()
    stages: dict[str, float] = {}


class ReportTransfers(msgspec.Struct, tag="report_transfers", frozen=True, kw_only=True):
    """A worker's finished transfers.

    Answered by `Ok` once they are on disk; kept and sent again until then.
    """

    incarnation: str
    records: tuple[TransferRecord, ...]


class ListTransfers(msgspec.Struct, tag="list_transfers", frozen=True, kw_only=True):
    """The newest ``limit`` transfers, newest first, that match all given filters. Answered by `Transfers`.

    ``after`` is a ledger sequence number: only later ones.
    """

    limit: int = 50
    after: int = 0
    request_id: str = ""
    engine_id: str = ""
    state: str = ""


class LedgerRow(msgspec.Struct, frozen=True):
    """A record with its sequence number in the ledger."""

    seq: int
    record: TransferRecord


class Transfers(msgspec.Struct, tag="transfers", frozen=True, kw_only=True):
    """Rows of the ledger, newest first; ``total`` counts all it holds."""

    rows: tuple[LedgerRow, ...]
    total: int
