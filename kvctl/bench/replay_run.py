"""A whole `kvctl replay`: reads the trace, replays it in each way, shows and reports."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvctl.bench.pair import BackendRun
from kvctl.bench.recorded import Recorded, recorded
from kvctl.bench.remote import ServeTarget
from kvctl.bench.replay import Replayed, ReplayPace, Way, recorded_figures, replay
from kvctl.bench.run import progress, tried, usable, workplace
from kvctl.cli.numbers import size, span
from kvctl.cli.report_file import check_report, write_report
from kvctl.cli.settings import Settings
from kvctl.errors import CheckFailed
from kvctl.ledger import trace_files
from kvctl.views.measuring.replay import LeftOut, Replay, Variant
from kvctl.views.output import show
from kvctl.views.registry import moment
from kvd.backends.registry import MEASURED
from kvd.trace.errors import TraceError
from kvd.trace.model import RecordedTrace
from kvd.trace.read import read_trace


@dataclass(frozen=True)
class ReplayOptions:
    """What `kvctl replay` was asked for; no backends means the recorded ones."""

    trace: str
    backends: tuple[str, ...]
    no_coalesce: bool
    environment: tuple[tuple[str, str], ...]
    pace: ReplayPace
    limit: int
    scale: float
    memory: int
    verify: bool
    report: Path | None
    to: ServeTarget | None = None


def run(wanted: ReplayOptions, settings: Settings) -> None:
    """Replay, show, write the report.

    Raises `CheckFailed` for a trace that cannot be used, for a wrong byte, and where no way could be run.
    """
    check_report(wanted.report)
    try:
        trace = read_trace(trace_files.found(wanted.trace))
    except TraceError as error:
        raise trace_files.failed(error) from None
    found = recorded(trace, wanted.limit, wanted.scale)
    taken = max(stream.scene.bytes for stream in found.streams)
    if taken > wanted.memory:
        raise CheckFailed(
            f"the transfers' blocks take {size(taken)} of memory, and --memory allows {size(wanted.memory)}",
            f"give more --memory, a lower --limit than {wanted.limit}, or a lower --scale than {wanted.scale:g}",
        )
    ways, notes = _ways(wanted, found)
    began, load = time.time(), os.getloadavg()[0]
    with workplace() as folder, progress(len(ways) * len(found.streams), settings) as told:
        replayed = functools.partial(replay, found.streams, wanted.pace, folder, told)
        runs = {
            way.name: functools.partial(replayed, way, verify=wanted.verify, to=wanted.to) for way in ways
        }
        needed = runs if len(runs) == 1 else ()
        replayed_ways, failures = tried(runs, needed, "run it again with this way alone")
    variants = [one.variant for one in replayed_ways]
    if not variants:
        raise CheckFailed("; ".join(notes + failures), "name another --backend")
    document = _document(wanted, trace, found, variants, notes + failures, (began, load, taken))
    show(document, settings)
    if wanted.report is not None:
        from kvctl.views.reports.replay import replay_page

        write_report(wanted.report, replay_page(document, trace, _again(trace, found, replayed_ways)))


def _again(
    trace: RecordedTrace, found: Recorded, replayed_ways: Sequence[Replayed]
) -> dict[int, dict[str, float]]:
    """The seconds of each transfer with each way, by its place in the trace."""
    places = {id(one): number for number, one in enumerate(trace.transfers)}
    order = [places[id(one)] for stream in found.streams for one in stream.transfers]
    again: dict[int, dict[str, float]] = {number: {} for number in order}
    for way in replayed_ways:
        for number, seconds in zip(order, way.seconds, strict=True):
            again[number][way.variant.name] = seconds
    return again


def _ways(wanted: ReplayOptions, found: Recorded) -> tuple[list[Way], list[str]]:
    """The plain way of each backend, and those that the options add."""
    names: Sequence[str] = wanted.backends
    notes: list[str] = []
    if not names:
        seen = sorted({one.backend for stream in found.streams for one in stream.transfers})
        names = [name for name in seen if name in MEASURED]
        if not names:
            notes.append(f"recorded with {', '.join(seen) or 'no backend'}, replayed with direct")
            names = ["direct"]
    names, more = usable(names)
    ways = []
    for name in names:
        ways.append(Way(BackendRun(name)))
        if wanted.no_coalesce:
            ways.append(Way(BackendRun(name), coalesce=False))
        # UCX is NIXL's; the others would be measured twice.
        ways += [
            Way(BackendRun(name, environment={key: value}))
            for key, value in wanted.environment
            if name == "nixl" or not key.startswith("UCX_")
        ]
    return ways, notes + more


def _document(
    wanted: ReplayOptions,
    trace: RecordedTrace,
    found: Recorded,
    variants: list[Variant],
    notes: list[str],
    when: tuple[float, float, int],
) -> Replay:
    began, load, taken = when
    transfers = [one for stream in found.streams for one in stream.transfers]
    used = {number for one in transfers for number in (one.local, one.remote)}
    recorded_bytes = sum(one.bytes for one in transfers)
    if wanted.scale == 1 and recorded_bytes != variants[0].bytes:
        notes.append(
            f"{recorded_bytes} bytes stand in the record, {variants[0].bytes} follow from its blocks"
        )
    if pushes := sum(one.mode == "push" for one in transfers):
        notes.append(
            f"{pushes} of them are pushes: written, with direct read, in one go;"
            " recorded layer by layer while they were computed"
        )
    length = max(one.at for one in transfers) - min(one.at for one in transfers)
    pace = f"{wanted.pace.in_flight} at a time"
    if wanted.pace.speed:
        faster = "" if wanted.pace.speed == 1 else f", {wanted.pace.speed:g} times as fast"
        pace = f"at the original times{faster}: {span(length)} of record"
    return Replay(
        trace=wanted.trace,
        models=tuple(sorted({trace.engines[number].line.model for number in used})),
        pace=pace,
        scale=wanted.scale,
        to=wanted.to.name if wanted.to else "",
        memory=taken,
        cores=os.cpu_count() or 1,
        load=load,
        started=moment(began),
        took=time.time() - began,
        recorded=recorded_figures(transfers),
        variants=tuple(variants),
        winner=max(variants, key=lambda one: one.bytes_per_second).name,
        left_out=tuple(LeftOut(transfers=n, reason=why) for why, n in found.left_out.items()),
        notes=tuple(notes),
    )
