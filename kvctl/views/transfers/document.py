"""The Transfers document: what `kvctl transfers` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kvctl.cli.numbers import clock, rate, size, span
from kvctl.cli.units import Bytes, BytesPerSecond, Count, Seconds, Time, filled
from kvctl.ledger.statistics import moving, took
from kvctl.views.folded.rows import listing
from kvctl.views.registry import View, moment, named
from kvctl.views.screen import Column, ScreenPart, measure, names, number, state
from kvd.geometry.rank import RankName
from kvd.wire.transfer import BlockRuns, LedgerRow, TransferState


class TransferShare(Struct, frozen=True, kw_only=True):
    """What a transfer moved of one KV cache group."""

    group: Count
    kind: str
    blocks: Count
    bytes: Bytes


class TransferBlocks(Struct, frozen=True, kw_only=True):
    """A transfer's blocks of one KV cache group."""

    group: Count
    first: Annotated[Count, Meta(description="number in the request of the block that the first id holds")]
    runs: Annotated[tuple[tuple[int, int], ...], Meta(description="runs of neighbours: first id, how many")]


class ChecksumOfGroup(Struct, frozen=True, kw_only=True):
    """What was compared of one KV cache group."""

    group: Count
    layers: Annotated[Count, Meta(description="layers that were compared")]
    differs: Annotated[
        str, Meta(description="the first layer that is not the same, with both sums; else empty")
    ]


class Checksum(Struct, frozen=True, kw_only=True):
    """The prefiller's checksums of what it handed over against the decoder's of what it has."""

    state: Annotated[
        Literal["", "ok", "differs", "unknown"], Meta(description="empty where nothing was to be compared")
    ]
    why: Annotated[str, Meta(description="why it is unknown")]
    seconds: Annotated[Seconds, Meta(description="from the end of the load to that of the comparison")]
    groups: tuple[ChecksumOfGroup, ...]


class TransferDocument(Struct, frozen=True, kw_only=True):
    """One worker's part of moving one request's KV, as it stands in the ledger."""

    seq: Annotated[int, Meta(description="number in the ledger, growing")]
    transfer_id: str
    request_id: str
    local_engine: str
    local_rank: RankName
    remote_engine: str
    remote_generation: str
    remote_request_id: str
    remote_ranks: tuple[RankName, ...]
    backend: str
    mode: Literal["pull", "push"]
    prefix: Annotated[
        bool, Meta(description="read from what the remote engine holds in its prefix cache, without a lease")
    ]
    state: TransferState
    cause: Annotated[str, Meta(description="why it was a miss")]
    code: Annotated[
        str, Meta(description="the same in one word (docs/transfers.md), empty of what was no miss")
    ]
    started: Time
    seconds: Annotated[Seconds, Meta(description="from the scheduler's claim to the end, in seconds")]
    bytes_per_second: Annotated[
        BytesPerSecond | None,
        Meta(
            description="bytes over the stages post and wire; null of a push, which runs beside the computing"
        ),
    ]
    tokens: Count
    bytes: Bytes
    descriptors: Count
    coalesced_descriptors: Count
    groups: tuple[TransferShare, ...]
    stages: Annotated[dict[str, Seconds], Meta(description="seconds in each stage, in order")]
    moments: Annotated[
        dict[str, float],
        Meta(description="when things happened, in seconds after started; queued is before it"),
    ]
    attempts: Annotated[Count, Meta(description="lanes that were tried, or announcements of a push")]
    local_generation: Annotated[str, Meta(description="empty where it is not known")]
    local_blocks: Annotated[tuple[TransferBlocks, ...], Meta(description="filled by kvctl transfer only")]
    remote_blocks: Annotated[
        tuple[TransferBlocks, ...], Meta(description="the same; empty of a push, which never learns them")
    ]
    blocks_cut: Annotated[bool, Meta(description="there were more runs of blocks than the ledger keeps")]
    checksum: Checksum


class Transfers(Struct, frozen=True, kw_only=True):
    """The transfers that match, newest first where no other order was asked for."""

    total: Annotated[int, Meta(ge=0, description="transfers in the ledger, matching or not")]
    transfers: tuple[TransferDocument, ...]


def transfer_document(row: LedgerRow) -> TransferDocument:
    """The document of one row of the ledger."""
    record = row.record
    return filled(
        TransferDocument,
        record,
        row,
        started=moment(record.started),
        seconds=took(record),
        bytes_per_second=record.bytes / moving(record) if moving(record) > 0 else None,
        groups=tuple(filled(TransferShare, share) for share in record.groups),
        local_blocks=_blocks(record.local_blocks),
        remote_blocks=_blocks(record.remote_blocks),
        checksum=filled(
            Checksum,
            record.checksum,
            groups=tuple(filled(ChecksumOfGroup, group) for group in record.checksum.groups),
        ),
    )


def _blocks(blocks: tuple[BlockRuns, ...]) -> tuple[TransferBlocks, ...]:
    return tuple(filled(TransferBlocks, one) for one in blocks)


def transfers_screen(body: Transfers, wide: bool) -> ScreenPart:
    """One transfer a line, newest first."""
    return listing(body.transfers, *transfer_columns(body.transfers, wide))


def transfer_columns(transfers: Sequence[TransferDocument], wide: bool) -> list[Column[Any]]:
    """The columns of transfers, their start first; code and cause are two as soon as one is a miss."""
    causes = wide or any(transfer.cause or transfer.code for transfer in transfers)
    return [
        Column("STARTED", lambda t: clock(t.started), fold="span", by=lambda t: t.started.timestamp()),
        names("REQUEST", lambda t: t.request_id),
        names("FROM", lambda t: t.remote_engine),
        names("TO", lambda t: f"{t.local_engine}/{t.local_rank}"),
        Column("STATE", lambda t: state(t.state)),
        measure("BYTES", lambda t: size(t.bytes), lambda t: t.bytes),
        measure("TIME", lambda t: span(t.seconds), lambda t: t.seconds),
        measure("RATE", lambda t: rate(t.bytes_per_second), lambda t: t.bytes_per_second),
        measure("SEQ", lambda t: t.seq, lambda t: t.seq, wide),
        names("TRANSFER", lambda t: t.transfer_id, wide),
        Column("BACKEND", lambda t: t.backend, wide),
        Column("MODE", lambda t: f"{t.mode}, prefix" if t.prefix else t.mode, wide),
        measure("TOKENS", lambda t: t.tokens, lambda t: t.tokens, wide),
        number("COPIES", copies, wide),
        Column("STAGES", stages, wide),
        Column("CHECKSUM", lambda t: t.checksum.state or "-", wide),
        Column("CODE", lambda t: t.code or "-", causes),
        names("CAUSE", lambda t: t.cause or "-", causes),
    ]


def copies(transfer: TransferDocument) -> str:
    """``4/96``: copies after coalescing and before; a dash where the first is not known."""
    return f"{transfer.coalesced_descriptors or '-'}/{transfer.descriptors}"


def stages(transfer: TransferDocument) -> str:
    """``queued 1.20 ms, wire 8.00 ms``: the stages that took any time, in order."""
    took = (f"{name} {span(seconds)}" for name, seconds in transfer.stages.items() if seconds > 0)
    return ", ".join(took) or "-"


# The number: a request may have many transfers, and its id may hold anything.
_NAMES = named("transfers", lambda one: str(one.seq))
VIEWS = (View(Transfers, transfers_screen, "transfers", TransferDocument, _NAMES),)
