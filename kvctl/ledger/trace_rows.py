"""Between the ledger's records and a trace's transfers, both ways."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvctl.cli.units import filled
from kvctl.ledger import trace_files
from kvctl.ledger.statistics import ORDERS, took
from kvd.geometry.model import EngineGeometry
from kvd.trace.errors import TraceError
from kvd.trace.model import RecordedTrace, TracedBlocks, TransferLine
from kvd.trace.read import open_trace
from kvd.wire.transfer import (
    BlockRuns,
    ChecksumResult,
    GroupShare,
    LedgerRow,
    ListTransfers,
    TransferList,
    TransferRecord,
)

LONGEST = 1e9
"""Seconds of a stage that a trace takes."""
MOST = 1 << 62


def matching(source: str, query: ListTransfers) -> TransferList:
    """The rows of a trace that match, as the ledger would give them. Raises `KvctlError`.

    They are numbered from 1 in the order of their start; ``within`` counts back from the last one.
    """
    path = trace_files.found(source)
    try:
        with open_trace(path) as (trace, transfers):
            rows = list(_rows(trace, transfers))
    except TraceError as error:
        raise trace_files.failed(error) from None
    end = max((row.record.started for row in rows), default=0.0)
    kept = sorted((row for row in rows if _matches(row, query, end)), key=ORDERS[query.order])
    return TransferList(rows=tuple(kept[: query.limit]), total=len(rows), more=len(kept) > query.limit)


def traced(
    record: TransferRecord, began: float, local: int, remote: int, names: tuple[str, str]
) -> TransferLine:
    """A record as a trace has it: ``local`` and ``remote`` are numbers of engines, ``names`` those to be written."""
    transfer_id, request_id = names
    return filled(
        TransferLine,
        record,
        transfer=transfer_id,
        request=request_id,
        local=local,
        remote=remote,
        at=max(0.0, record.started - began),
        bytes=min(record.bytes, MOST),
        local_blocks=tuple(TracedBlocks(b.group, b.first, b.runs) for b in record.local_blocks),
        remote_blocks=tuple(TracedBlocks(b.group, b.first, b.runs) for b in record.remote_blocks),
        cut=record.blocks_cut,
        stages={name: _within(seconds, 0.0) for name, seconds in record.stages.items()},
        moments={name: _within(at, -LONGEST) for name, at in record.moments.items()},
    )


def _within(seconds: float, least: float) -> float:
    """A time that a trace takes, whatever a worker's clock said."""
    return min(max(least, seconds), LONGEST) if seconds == seconds else 0.0  # noqa: PLR0124 (not a number)


def _rows(trace: RecordedTrace, transfers: Iterator[TransferLine]) -> Iterator[LedgerRow]:
    for number, one in enumerate(transfers, 1):
        local, remote = trace.engines[one.local].line, trace.engines[one.remote].line
        record = filled(
            TransferRecord,
            one,
            transfer_id=one.transfer,
            request_id=one.request,
            local_engine=local.engine_id,
            local_generation=local.generation,
            remote_engine=remote.engine_id,
            remote_generation=remote.generation,
            remote_request_id="",
            started=trace.header.began + one.at,
            groups=tuple(_shares(trace.engines[one.local].geometry, one.local_blocks)),
            local_blocks=tuple(BlockRuns(b.group, b.first, b.runs) for b in one.local_blocks),
            remote_blocks=tuple(BlockRuns(b.group, b.first, b.runs) for b in one.remote_blocks),
            blocks_cut=one.cut,
            # A trace has none of these.
            uid=-1,
            cause="",
            checksum=ChecksumResult(),
            traceparent="",
            prefix=False,
        )
        yield LedgerRow(number, record, record.started)


def _shares(engine: EngineGeometry | None, lists: Iterable[TracedBlocks]) -> Iterator[GroupShare]:
    """Blocks of each group; how many bytes a group took a trace does not say."""
    kinds = {group.index: group.kind for group in engine.workers[0].groups} if engine else {}
    for blocks in lists:
        yield GroupShare(blocks.group, kinds.get(blocks.group, "unknown"), blocks.count, 0)


def _matches(row: LedgerRow, query: ListTransfers, end: float) -> bool:
    r = row.record
    sides = (r.local_engine, r.remote_engine)
    return (
        row.seq > query.after
        and query.any_id in ("", r.transfer_id, r.request_id, str(row.seq))
        and query.request_id in ("", r.request_id)
        and (not query.engine_id or query.engine_id in sides)
        and (not query.peer or query.peer in (sides if query.engine_id else sides[1:]))
        and query.state in ("", r.state)
        and query.code in ("", r.code)
        and query.backend in ("", r.backend)
        and query.mode in ("", r.mode)
        and (not query.within or r.started >= end - query.within)
        and (not query.slower_than or took(r) > query.slower_than)
    )
