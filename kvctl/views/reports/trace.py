"""The report of `kvctl trace show`: a record as it is, and the parts of it that a replay's report has too."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from kvctl.cli.numbers import span
from kvctl.views.registry import moment
from kvctl.views.reports.page import PageFact, Section, origin, page, table_html, utc
from kvctl.views.reports.transfers import ReportedTransfer, transfer_sections
from kvctl.views.screen import Column, sizes, table
from kvctl.views.trace import Trace, pairs_table
from kvd.trace.model import Header, RecordedTrace, TracedEngine, TransferLine


def trace_page(body: Trace, trace: RecordedTrace) -> str:
    """The whole as one file of HTML."""
    return page(
        f"Transfers of {body.name}",
        [*origin(datetime.fromtimestamp(time.time(), UTC)), *record_facts(trace.header, trace.transfers)],
        [],
        [
            *transfer_sections(reported(trace, trace.transfers)),
            Section("Pairs of engines", table_html(pairs_table(body))),
            Section("Engines", engines_html(trace.engines)),
        ],
    )


def record_facts(header: Header, transfers: Sequence[TransferLine]) -> list[PageFact]:
    """When a trace was recorded, by what, and how much is in it."""
    first, last = (of((one.at for one in transfers), default=0.0) for of in (min, max))
    missed = sum(one.state == "miss" for one in transfers)
    requests = len({one.request for one in transfers})
    counted = f"{len(transfers)} transfers of {requests} requests, {missed} of them misses"
    return [
        ("Recorded", f"{utc(moment(header.began + first))}, {span(last - first)} from the first to the last"),
        ("Written by", header.written_by or "unknown"),
        ("Holds", counted + (", ids of requests as digests" if header.hashed else "")),
    ]


def reported(
    trace: RecordedTrace,
    transfers: Iterable[TransferLine],
    again: Mapping[int, Mapping[str, float]] | None = None,
) -> list[ReportedTransfer]:
    """Transfers with the names of their engines; ``again`` is what each took when it was moved again."""
    engines = [engine.line for engine in trace.engines]
    return [
        ReportedTransfer(
            request=one.request,
            source=engines[one.remote].engine_id,
            reader=engines[one.local].engine_id,
            rank=one.local_rank,
            how=" ".join(filter(None, (one.backend, one.mode))),
            began=trace.header.began + one.at,
            stages=one.stages,
            bytes=one.bytes,
            copies=one.coalesced_descriptors or one.descriptors,
            tokens=one.tokens,
            missed=(one.code or "UNKNOWN") if one.state == "miss" else "",
            again=tuple((again or {}).get(number, {}).items()),
        )
        for number, one in enumerate(transfers)
    ]


def engines_html(engines: Iterable[TracedEngine]) -> str:
    """Which engines they are, with versions and what else they told of themselves."""
    told = table(
        tuple(engine.line for engine in engines),
        Column("ENGINE", lambda line: line.engine_id),
        Column("GENERATION", lambda line: line.generation or "-"),
        Column("MODEL", lambda line: line.model or "-"),
        Column("SHAPE", lambda line: sizes(tp=line.tp, pp=line.pp, dcp=line.dcp)),
        Column("VLLM", lambda line: str(line.facts.get("vllm_version") or "-")),
        Column("CONNECTOR", lambda line: str(line.facts.get("connector_version") or "-")),
        Column("BACKEND", lambda line: str(line.facts.get("backend") or "-")),
    )
    return table_html(told)
