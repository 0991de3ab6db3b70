"""Reads and checks traces. They come from elsewhere: every size is looked at before memory is taken for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvd.geometry.codec import worker_from_plain
from kvd.geometry.errors import GeometryError
from kvd.geometry.model import EngineGeometry, WorkerGeometry
from kvd.trace.check import EngineBounds, bounds_of, check_blocks
from kvd.trace.errors import BadTrace, NotATrace, TraceCut, TraceTooLarge, TraceVersionError
from kvd.trace.model import (
    SCHEMA,
    End,
    EngineLine,
    Header,
    RecordedTrace,
    TracedEngine,
    TraceLine,
    TransferLine,
    WorkerLine,
)
from kvd.trace.streams import reading

_LINE: msgspec.json.Decoder[TraceLine] = msgspec.json.Decoder(TraceLine)


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that is taken: bytes of a line, of all geometry, of the whole unpacked; engines, transfers, items.

    Items are what transfers consist of: runs and lists of blocks, ranks, stages, moments, and `FIXED` for each transfer
    itself. A whole trace at all of these limits takes about 5 GB; one of 10,000 transfers as they are about 30 MB.
    """

    line_bytes: int = 1 << 20
    geometry_bytes: int = 64 << 20
    total_bytes: int = 512 << 20
    engines: int = 4096
    transfers: int = 1_000_000
    items: int = 16_000_000


FIXED = 8
LIMITS = Limits()


def read_trace(path: Path, limits: Limits = LIMITS) -> RecordedTrace:
    """The whole trace; ``-`` is stdin. Raises a `TraceError` that names the file and the line."""
    with reading(path) as stream:
        begun = _begin(stream, path, limits)
        return RecordedTrace(begun.header, begun.engines, tuple(_transfers(begun)))


@contextlib.contextmanager
def open_trace(path: Path, limits: Limits = LIMITS) -> Iterator[tuple[RecordedTrace, Iterator[TransferLine]]]:
    """A trace without its transfers, and those one by one as they are read: for those that need no list of all.

    Raises a `TraceError` that names the file and the line, from the iterator as well.
    """
    with reading(path) as stream:
        begun = _begin(stream, path, limits)
        yield RecordedTrace(begun.header, begun.engines, ()), _transfers(begun)


@dataclass(slots=True)
class _Lines:
    """The lines of one file, and what of the limits is used up."""

    stream: BinaryIO
    path: Path
    limits: Limits
    number: int = 0
    total: int = 0

    @property
    def place(self) -> str:
        return f"{self.path}, line {self.number}"

    def next(self) -> bytes | None:
        """The next line, None at the end. One that is too long is not read."""
        data = self.stream.readline(self.limits.line_bytes + 1)
        if not data:
            return None
        self.number += 1
        self.total += len(data)
        if len(data) > self.limits.line_bytes:
            raise TraceTooLarge(f"{self.place} has more than {self.limits.line_bytes} bytes", _FEWER)
        if self.total > self.limits.total_bytes:
            raise TraceTooLarge(
                f"{self.path} has more than {self.limits.total_bytes} bytes when unpacked", _FEWER
            )
        return data

    def line(self) -> TraceLine | None:
        """The next line as what it is, None at the end."""
        data = self.next()
        if data is None:
            return None
        if not data.endswith(b"\n"):
            raise TraceCut(f"{self.place} breaks off after {len(data)} bytes", _AGAIN)
        try:
            return _LINE.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise BadTrace(f"{self.place}: {str(error)[:300]}", _AGAIN) from None


_FEWER = "export fewer transfers at a time: kvctl trace export --last N, --since, --request"
_AGAIN = "copy it, or export it, anew"


@dataclass(slots=True)
class _Begun:
    """A trace of which everything but the transfers is read; ``line`` is the first one after."""

    header: Header
    engines: tuple[TracedEngine, ...]
    lines: _Lines
    line: TraceLine | None
    bounds: tuple[EngineBounds | None, ...]


def _begin(stream: BinaryIO, path: Path, limits: Limits) -> _Begun:
    lines = _Lines(stream, path, limits)
    header = _header(lines)
    engines: list[TracedEngine] = []
    line = lines.line()
    geometry = 0
    while isinstance(line, EngineLine):
        if len(engines) == limits.engines:
            raise TraceTooLarge(f"{lines.place}: more than {limits.engines} engines", _FEWER)
        workers = []
        for number in range(line.workers):
            before = lines.total
            found = lines.line()
            geometry += lines.total - before
            if geometry > limits.geometry_bytes:
                raise TraceTooLarge(
                    f"{lines.place}: more than {limits.geometry_bytes} bytes of geometry", _FEWER
                )
            if not isinstance(found, WorkerLine):
                raise _unexpected(lines, found, f"worker {number} of {line.workers} of {line.engine_id!r}")
            workers.append(_worker(lines, found))
        engines.append(TracedEngine(line, _geometry(lines, line, workers)))
        line = lines.line()
    return _Begun(header, tuple(engines), lines, line, tuple(bounds_of(e.geometry) for e in engines))


def _header(lines: _Lines) -> Header:
    data = lines.next()
    if data is None:
        raise NotATrace(f"{lines.path} is empty", "kvctl trace export writes traces")
    try:
        plain = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        plain = None
    if not isinstance(plain, dict) or plain.get("line") != "trace":
        raise NotATrace(
            f"{lines.path} is no trace: its first line does not say so", "kvctl trace export writes traces"
        )
    if plain.get("schema") != SCHEMA:
        raise TraceVersionError(
            f"{lines.path} is a trace of schema {str(plain.get('schema'))[:40]}; this version reads {SCHEMA}",
            "use the kvctl that wrote it, or export it anew",
        )
    try:
        return msgspec.convert(plain, Header)
    except msgspec.ValidationError as error:
        raise BadTrace(f"{lines.place}: {error}", _AGAIN) from None


def _worker(lines: _Lines, line: WorkerLine) -> WorkerGeometry:
    try:
        return worker_from_plain(line.geometry)
    except (GeometryError, ArithmeticError, RecursionError) as error:
        raise BadTrace(f"{lines.place}: the geometry cannot be used: {str(error)[:300]}", _AGAIN) from None


def _geometry(lines: _Lines, line: EngineLine, workers: list[WorkerGeometry]) -> EngineGeometry | None:
    if not workers:
        return None
    ranks = {worker.rank for worker in workers}
    if len(ranks) < len(workers):
        raise BadTrace(f"{lines.place}: engine {line.engine_id!r} has two workers of one rank", _AGAIN)
    return EngineGeometry(
        line.engine_id, line.generation, line.model, line.tp, line.pp, line.dcp, tuple(workers), line.facts
    )


def _transfers(begun: _Begun) -> Iterator[TransferLine]:
    lines, line = begun.lines, begun.line
    count = items = 0
    while isinstance(line, TransferLine):
        count += 1
        if count > lines.limits.transfers:
            raise TraceTooLarge(f"{lines.place}: more than {lines.limits.transfers} transfers", _FEWER)
        try:
            check_blocks(line, begun.bounds)
        except BadTrace as error:
            raise BadTrace(f"{lines.place}: {error.message}", _AGAIN) from None
        except TraceTooLarge as error:
            raise TraceTooLarge(f"{lines.place}: {error.message}", _FEWER) from None
        items += _items(line)
        if items > lines.limits.items:
            raise TraceTooLarge(
                f"{lines.place}: more than {lines.limits.items} runs of blocks, stages and the like", _FEWER
            )
        yield line
        line = lines.line()
    if not isinstance(line, End):
        raise _unexpected(lines, line, "a transfer or the end")
    if line.transfers != count:
        raise TraceCut(f"{lines.place}: {line.transfers} transfers were written, {count} stand there", _AGAIN)
    if lines.next() is not None:
        raise BadTrace(f"{lines.place}: something follows the last line", _AGAIN)


def _items(transfer: TransferLine) -> int:
    lists = (*transfer.local_blocks, *transfer.remote_blocks)
    return (
        FIXED
        + len(lists)
        + sum(len(blocks.runs) for blocks in lists)
        + len(transfer.remote_ranks)
        + len(transfer.stages)
        + len(transfer.moments)
    )


def _unexpected(lines: _Lines, line: TraceLine | None, wanted: str) -> TraceCut | BadTrace:
    if line is None:
        return TraceCut(f"{lines.path} ends after line {lines.number}, before {wanted}", _AGAIN)
    kind = type(line).__struct_config__.tag
    return BadTrace(f"{lines.place} is of kind {kind!r} where {wanted} was expected", _AGAIN)
