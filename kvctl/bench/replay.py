"""Replays the streams of a trace with one backend, and compares the stages with the record."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvctl.bench.measure import Difference, TellStep
from kvctl.bench.moving import STAGES
from kvctl.bench.pair import BackendRun, ProcessPair, pair
from kvctl.bench.recorded import RecordedStream, batches
from kvctl.bench.remote import ServeTarget
from kvctl.views.measuring.benchmark import quantiles
from kvctl.views.measuring.replay import RecordedFigures, Variant
from kvd.backends.contract import Operation
from kvd.trace.model import TransferLine

BATCH = 256
LONGEST = 20.0
"""Seconds of the record in one batch: between batches memory is filled and compared."""
RECORDED_STAGES = ("queued", "handshake", "plan", "post", "wire")
"""Those every record has, in their order; others a record has come after."""


@dataclass(frozen=True)
class ReplayPace:
    """When transfers begin: ``speed`` times as fast as they did, or ``in_flight`` at a time as fast as possible."""

    speed: float | None
    in_flight: int


@dataclass(frozen=True)
class Way:
    """One way to replay: a backend with its environment, with or without joining neighbouring blocks."""

    backend: BackendRun
    coalesce: bool = True

    @property
    def name(self) -> str:
        """What it is called on the screen."""
        extra = [f"{key}={value}" for key, value in self.backend.environment.items()]
        return ", ".join([self.backend.name, *([] if self.coalesce else ["no coalescing"]), *extra])


@dataclass(slots=True)
class _Found:
    """What was seen of one way: one answer for each request, the seconds in which any was under way."""

    answers: list[dict[str, Any]] = field(default_factory=list)
    busy: float = 0.0
    transports: set[str] = field(default_factory=set)


class Replayed(NamedTuple):
    """One way's figures, and the seconds of each transfer, in the order of the streams."""

    variant: Variant
    seconds: tuple[float, ...]


def replay(
    streams: Sequence[RecordedStream],
    pace: ReplayPace,
    folder: Path,
    told: TellStep,
    way: Way,
    *,
    verify: bool = True,
    to: ServeTarget | None = None,
) -> Replayed:
    """Replay all streams one after the other, with the sources at ``to`` and logs below ``folder``.

    Raises `WorkerFailed` where the backend cannot, `Difference` where a byte landed wrong.
    """
    # UCX's logs are told apart by their folder.
    folder = Path(tempfile.mkdtemp(dir=folder))
    found = _Found()
    for stream in streams:
        with pair(stream.scene, way.backend, folder, to) as both:
            for batch in _timed(stream, pace):
                _batch(both, stream, batch, way, pace, found, verify=verify)
                told(f"{way.name}: {len(found.answers)} transfers")
        found.transports.add(both.transport(_operation(both, stream)))
    return Replayed(_variant(way, found, verify=verify), tuple(one["seconds"] for one in found.answers))


def recorded_figures(transfers: Sequence[TransferLine]) -> RecordedFigures:
    """The record of what is replayed."""
    names = dict.fromkeys((*RECORDED_STAGES, *(name for one in transfers for name in one.stages)))
    moving = sum(one.stages.get("post", 0.0) + one.stages.get("wire", 0.0) for one in transfers)
    size = sum(one.bytes for one in transfers)
    return RecordedFigures(
        transfers=len(transfers),
        bytes=size,
        descriptors=sum(one.coalesced_descriptors or one.descriptors for one in transfers),
        backends=tuple(sorted({one.backend for one in transfers})),
        seconds=quantiles(sum(one.stages.values()) for one in transfers),
        stages={name: quantiles(one.stages.get(name, 0.0) for one in transfers) for name in names},
        bytes_per_second=size / moving if moving else 0.0,
    )


def dominant(stages: dict[str, float]) -> tuple[str, float]:
    """The stage that takes most of the time, and its share."""
    total = sum(stages.values())
    name = max(stages, key=lambda one: stages[one])
    return name, stages[name] / total if total else 0.0


def _timed(stream: RecordedStream, pace: ReplayPace) -> Iterator[range]:
    """The batches, each when it is due; the time for filling and comparing is not the record's and shifts the rest."""
    began = time.monotonic() - (stream.transfers[0].at / pace.speed if pace.speed else 0.0)
    for batch in batches(stream, BATCH, LONGEST * (pace.speed or 1.0)):
        if pace.speed:
            due = began + stream.transfers[batch.start].at / pace.speed
            time.sleep(max(0.0, due - time.monotonic()))
            began = max(began, time.monotonic() - stream.transfers[batch.start].at / pace.speed)
        yield batch


def _operation(both: ProcessPair, stream: RecordedStream) -> Operation:
    """Pushes are writes; a backend that cannot write reads them, as the connector does with it."""
    return "write" if stream.mode == "push" and both.lands else "read"


def _batch(
    both: ProcessPair,
    stream: RecordedStream,
    batch: range,
    way: Way,
    pace: ReplayPace,
    found: _Found,
    *,
    verify: bool,
) -> None:
    requests = stream.requests[batch.start : batch.stop]
    at = None
    if pace.speed:
        first = stream.transfers[batch.start].at
        at = [(one.at - first) / pace.speed for one in stream.transfers[batch.start : batch.stop]]
    if verify:
        both.fill(requests, "")
    operation = _operation(both, stream)
    answer = both.move(requests, operation, at, coalesce=way.coalesce, in_flight=pace.in_flight)
    found.answers += answer["requests"]
    found.busy += _busy(at, answer)
    if verify and (difference := both.difference(requests, "")):
        name = stream.transfers[batch.start].request
        raise Difference(f"{way.name}, from request {name} on: {difference}")


def _busy(at: Sequence[float] | None, answer: dict[str, Any]) -> float:
    """Seconds in which at least one request was under way."""
    if at is None:
        return float(answer["seconds"])
    spans = sorted(
        (begin + one["late"], begin + one["late"] + one["seconds"])
        for begin, one in zip(at, answer["requests"], strict=True)
    )
    busy, end = 0.0, 0.0
    for begin, until in spans:
        busy += max(0.0, until - max(begin, end))
        end = max(end, until)
    return busy


def _variant(way: Way, found: _Found, *, verify: bool) -> Variant:
    answers = found.answers
    size = sum(one["bytes"] for one in answers)
    stage, share = dominant({name: sum(one["stages"][name] for one in answers) for name in STAGES})
    return Variant(
        name=way.name,
        backend=way.backend.name,
        coalesced=way.coalesce,
        environment=dict(way.backend.environment),
        transport=", ".join(sorted(found.transports - {""})),
        transfers=len(answers),
        bytes=size,
        descriptors=sum(one["descriptors"] for one in answers),
        verified=verify,
        late=quantiles(one["late"] for one in answers),
        seconds=quantiles(one["seconds"] for one in answers),
        stages={name: quantiles(one["stages"][name] for one in answers) for name in STAGES},
        bytes_per_second=size / found.busy if found.busy else 0.0,
        dominant=stage,
        dominant_share=share,
    )
