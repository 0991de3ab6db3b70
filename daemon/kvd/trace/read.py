"""Reads and checks traces. They come from elsewhere: every size is looked at before memory is taken for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvd.geometry.codec import worker_from_plain
from kvd.geometry.errors import GeometryError
from kvd.geometry.model import EngineGeometry, WorkerGeometry
from kvd.trace.errors import BadTrace, NotATrace, TraceCut, TraceTooLarge, TraceVersionError
from kvd.trace.model import (
    MAX_BLOCKS,
    SCHEMA,
    Blocks,
    End,
    Engine,
    Header,
    Line,
    Trace,
    TracedEngine,
    Transfer,
    Worker,
)
from kvd.trace.streams import reading

_LINE: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that is taken: bytes of a line, of all geometry, of the whole; engines, transfers, runs of blocks.

    The defaults of what is held at a time (all but ``total_bytes``) come to about 3 GB at the very worst.
    """

    line_bytes: int = 1 << 20
    geometry_bytes: int = 64 << 20
    total_bytes: int = 1 << 30
    engines: int = 4096
    transfers: int = 1_000_000
    runs: int = 8_000_000


LIMITS = Limits()


def read_trace(path: Path, limits: Limits = LIMITS) -> Trace:
    """The whole trace; ``-`` is stdin. Raises a `TraceError` that names the file and the line."""
    with reading(path) as stream:
        begun = _begin(stream, path, limits)
        return Trace(begun.header, begun.engines, tuple(_transfers(begun)))


@contextlib.contextmanager
def open_trace(path: Path, limits: Limits = LIMITS) -> Iterator[tuple[Trace, Iterator[Transfer]]]:
    """A trace without its transfers, and those one by one as they are read: for those that need no list of all.

    Raises a `TraceError` that names the file and the line, from the iterator as well.
    """
    with reading(path) as stream:
        begun = _begin(stream, path, limits)
        yield Trace(begun.header, begun.engines, ()), _transfers(begun)


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

    def line(self) -> Line | None:
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
    line: Line | None
    known: dict[int, _Bounds] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What an engine's transfers may name: numbers of blocks by group; an engine that is not known allows anything."""

    groups: int
    blocks: int


def _begin(stream: BinaryIO, path: Path, limits: Limits) -> _Begun:
    lines = _Lines(stream, path, limits)
    header = _header(lines)
    engines: list[TracedEngine] = []
    line = lines.line()
    geometry = 0
    while isinstance(line, Engine):
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
            if not isinstance(found, Worker):
                raise _unexpected(lines, found, f"worker {number} of {line.workers} of {line.engine_id!r}")
            workers.append(_worker(lines, found))
        engines.append(TracedEngine(line, _geometry(lines, line, workers)))
        line = lines.line()
    begun = _Begun(header, tuple(engines), lines, line)
    for number, engine in enumerate(engines):
        if engine.geometry is not None:
            begun.known[number] = _Bounds(
                max(len(w.groups) for w in engine.geometry.workers),
                max(w.num_blocks for w in engine.geometry.workers),
            )
    return begun


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


def _worker(lines: _Lines, line: Worker) -> WorkerGeometry:
    try:
        return worker_from_plain(line.geometry)
    except (GeometryError, ArithmeticError, RecursionError) as error:
        raise BadTrace(f"{lines.place}: the geometry cannot be used: {str(error)[:300]}", _AGAIN) from None


def _geometry(lines: _Lines, line: Engine, workers: list[WorkerGeometry]) -> EngineGeometry | None:
    if not workers:
        return None
    ranks = {worker.rank for worker in workers}
    if len(ranks) < len(workers):
        raise BadTrace(f"{lines.place}: engine {line.engine_id!r} has two workers of one rank", _AGAIN)
    return EngineGeometry(
        engine_id=line.engine_id,
        generation=line.generation,
        model=line.model,
        tp=line.tp,
        pp=line.pp,
        dcp=line.dcp,
        workers=tuple(workers),
        facts=dict(line.facts),
    )


def _transfers(begun: _Begun) -> Iterator[Transfer]:
    lines, line = begun.lines, begun.line
    count = runs = 0
    while isinstance(line, Transfer):
        count += 1
        if count > lines.limits.transfers:
            raise TraceTooLarge(f"{lines.place}: more than {lines.limits.transfers} transfers", _FEWER)
        _check(begun, line)
        runs += sum(len(blocks.runs) for blocks in (*line.local_blocks, *line.remote_blocks))
        if runs > lines.limits.runs:
            raise TraceTooLarge(f"{lines.place}: more than {lines.limits.runs} runs of blocks", _FEWER)
        yield line
        line = lines.line()
    if not isinstance(line, End):
        raise _unexpected(lines, line, "a transfer or the end")
    if line.transfers != count:
        raise TraceCut(f"{lines.place}: {line.transfers} transfers were written, {count} stand there", _AGAIN)
    if lines.next() is not None:
        raise BadTrace(f"{lines.place}: something follows the last line", _AGAIN)


def _check(begun: _Begun, transfer: Transfer) -> None:
    """What the shape of a line does not say: engines that exist, blocks that they have, each filled once."""
    place = begun.lines.place
    sides = (
        ("local", transfer.local, transfer.local_blocks),
        ("remote", transfer.remote, transfer.remote_blocks),
    )
    for side, engine, lists in sides:
        if engine >= len(begun.engines):
            raise BadTrace(f"{place}: the {side} engine is number {engine} of {len(begun.engines)}", _AGAIN)
        if (total := sum(blocks.count for blocks in lists)) > MAX_BLOCKS:
            raise TraceTooLarge(f"{place}: {total} {side} blocks; at most {MAX_BLOCKS} are taken", _FEWER)
        if len({blocks.group for blocks in lists}) < len(lists):
            raise BadTrace(f"{place}: two {side} lists of one group", _AGAIN)
        bounds = begun.known.get(engine)
        for blocks in lists:
            if bounds is not None:
                _check_bounds(f"{place}: {side} group {blocks.group}", blocks, bounds)
            if side == "local":
                _check_once(f"{place}: local group {blocks.group}", blocks)


def _check_bounds(what: str, blocks: Blocks, bounds: _Bounds) -> None:
    if blocks.group >= bounds.groups:
        raise BadTrace(f"{what}: the engine has {bounds.groups} groups", _AGAIN)
    for start, count in blocks.runs:
        if start + count > bounds.blocks:
            raise BadTrace(
                f"{what}: blocks {start} to {start + count - 1}, the engine has {bounds.blocks}", _AGAIN
            )


def _check_once(what: str, blocks: Blocks) -> None:
    end = 0
    for start, count in sorted(blocks.runs):
        if start < end:
            raise BadTrace(f"{what}: block {start} stands there twice", _AGAIN)
        end = start + count


def _unexpected(lines: _Lines, line: Line | None, wanted: str) -> TraceCut | BadTrace:
    if line is None:
        return TraceCut(f"{lines.path} ends after line {lines.number}, before {wanted}", _AGAIN)
    kind = type(line).__struct_config__.tag
    return BadTrace(f"{lines.place} is of kind {kind!r} where {wanted} was expected", _AGAIN)
