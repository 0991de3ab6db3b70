"""The Workers document: what `kvctl workers` prints."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvctl.cli.numbers import age, size, span
from kvctl.cli.units import Bytes, Count, RankName, Seconds, Time, filled
from kvctl.views.registry import View, moment
from kvctl.views.screen import Cell, Part, TextTable, state
from kvd.wire.query import WorkerRow


class Worker(Struct, frozen=True, kw_only=True):
    """One local process registered with kvd."""

    client: Annotated[str, Meta(description="worker or scheduler")]
    engine_id: str
    rank: Annotated[RankName | None, Meta(description="null for a scheduler")]
    pid: int
    incarnation: Annotated[str, Meta(description="new at each start of the process")]
    state: Annotated[str, Meta(description="alive, silent or gone")]
    registered: Time
    heartbeat_age: Annotated[Seconds, Meta(description="seconds since it was last heard of")]
    backend: str
    regions: Annotated[Count, Meta(description="spans of memory registered with the backend")]
    registered_bytes: Bytes
    reason: str


class Workers(Struct, frozen=True, kw_only=True):
    """The local workers and schedulers, engine by engine."""

    workers: tuple[Worker, ...]


def worker_document(row: WorkerRow) -> Worker:
    """The document of one row of kvd's answer."""
    return filled(
        Worker,
        row,
        client=row.kind,
        rank=str(row.rank) if row.rank else None,
        registered=moment(row.registered),
        heartbeat_age=max(0.0, row.heartbeat_age),
    )


def workers_screen(body: Workers, wide: bool) -> Part:
    """One process a line."""
    reasons = wide or any(worker.reason for worker in body.workers)
    headers = ["ENGINE", "RANK", "PID", "STATE", "HEARD", "BACKEND", "MEMORY"]
    if wide:
        headers += ["REGIONS", "REGISTERED", "INCARNATION"]
    if reasons:
        headers.append("REASON")
    rows: list[list[Cell]] = []
    for worker in body.workers:
        row: list[Cell] = [
            worker.engine_id,
            worker.rank or worker.client,
            str(worker.pid),
            state(worker.state),
            span(worker.heartbeat_age),
            worker.backend or "-",
            size(worker.registered_bytes) if worker.rank else "-",
        ]
        if wide:
            row += [str(worker.regions) if worker.rank else "-", age(worker.registered), worker.incarnation]
        if reasons:
            row.append(worker.reason or "-")
        rows.append(row)
    return TextTable(headers, rows, right="PID HEARD MEMORY REGIONS REGISTERED")


VIEWS = (View(Workers, workers_screen, "workers", Worker),)
