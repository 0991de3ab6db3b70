"""The Workers document: what `kvctl workers` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from kvctl.cli.numbers import age, size, span
from kvctl.cli.units import Bytes, Count, Seconds, Time, filled
from kvctl.views.folded.rows import listing
from kvctl.views.registry import View, moment, named
from kvctl.views.screen import Column, ScreenPart, measure, names, number, state
from kvd.geometry.rank import RankName
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
    at: Annotated[
        str | None,
        Meta(description="the kvd it is registered with, for engines on several hosts; null: this one"),
    ] = None


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
        at=str(row.at) if row.at else None,
    )


def workers_screen(body: Workers, wide: bool) -> ScreenPart:
    """One process a line."""
    return listing(body.workers, *worker_columns(body.workers, wide))


def worker_columns(workers: Sequence[Worker], wide: bool) -> list[Column[Any]]:
    """The columns of processes, their engine first."""
    afar = any(worker.at for worker in workers)
    reasons = wide or any(worker.reason for worker in workers)
    return [
        names("ENGINE", lambda w: w.engine_id),
        names("RANK", lambda w: w.rank or w.client),
        measure("PID", lambda w: w.pid, lambda w: w.pid),
        names("AT", lambda w: w.at or "-", afar),
        Column("STATE", lambda w: state(w.state)),
        measure("HEARD", lambda w: span(w.heartbeat_age), lambda w: w.heartbeat_age),
        Column("BACKEND", lambda w: w.backend or "-"),
        measure(
            "MEMORY",
            lambda w: size(w.registered_bytes) if w.rank else "-",
            lambda w: w.registered_bytes if w.rank else None,
        ),
        number("REGIONS", lambda w: w.regions if w.rank else "-", wide),
        measure("REGISTERED", lambda w: age(w.registered), lambda w: -w.registered.timestamp(), wide),
        names("INCARNATION", lambda w: w.incarnation, wide),
        names("REASON", lambda w: w.reason or "-", reasons),
    ]


def worker_name(worker: Worker) -> str:
    """As -o name has it."""
    return f"{worker.engine_id}/{worker.rank or worker.client}"


VIEWS = (View(Workers, workers_screen, "workers", Worker, named("workers", worker_name)),)
