"""Writes a trace, line by line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import BinaryIO

import msgspec

from kvd.geometry.codec import worker_to_plain
from kvd.geometry.model import EngineGeometry
from kvd.trace.anonymous import without_addresses
from kvd.trace.check import EngineBounds, bounds_of, check_blocks
from kvd.trace.errors import BadTrace, TraceError
from kvd.trace.model import End, EngineLine, Header, TracedEngine, TraceLine, TransferLine, WorkerLine

_encode = msgspec.json.Encoder().encode


def write_trace(
    out: BinaryIO, header: Header, engines: Iterable[TracedEngine], transfers: Iterable[TransferLine]
) -> int:
    """Write a whole trace, geometries without their addresses; returns how many transfers it has.

    Blocks that cannot be true (a miss may have been one because of them) are left out, and the transfer marked ``cut``:
    what is written here can be read again. Raises `BadTrace` for a transfer that cannot be written at all.
    """
    _put(out, header)
    bounds = []
    for engine in engines:
        bounds.append(bounds_of(engine.geometry))
        if engine.geometry is None:
            _put(out, msgspec.structs.replace(engine.line, workers=0))
            continue
        clean = without_addresses(engine.geometry)
        _put(out, _engine_line(clean))
        for worker in clean.workers:
            _put(out, WorkerLine(geometry=worker_to_plain(worker)))
    count = 0
    for transfer in transfers:
        _put(out, _readable(transfer, bounds))
        count += 1
    _put(out, End(transfers=count))
    return count


def _engine_line(engine: EngineGeometry) -> EngineLine:
    return EngineLine(
        engine_id=engine.engine_id,
        generation=engine.generation,
        model=engine.model,
        tp=engine.tp,
        pp=engine.pp,
        dcp=engine.dcp,
        facts=engine.facts,
        workers=len(engine.workers),
    )


def _readable(transfer: TransferLine, bounds: list[EngineBounds | None]) -> TransferLine:
    try:
        _valid(transfer, bounds)
    except (TraceError, msgspec.ValidationError):
        bare = msgspec.structs.replace(transfer, local_blocks=(), remote_blocks=(), cut=True)
        try:
            _valid(bare, bounds)
        except msgspec.ValidationError as error:
            raise BadTrace(
                f"transfer {transfer.transfer!r} cannot stand in a trace: {error}",
                "leave it out with a filter",
            ) from None
        return bare
    return transfer


def _valid(transfer: TransferLine, bounds: list[EngineBounds | None]) -> None:
    msgspec.convert(msgspec.to_builtins(transfer), TransferLine)
    check_blocks(transfer, bounds)


def _put(out: BinaryIO, line: TraceLine) -> None:
    out.write(_encode(line))
    out.write(b"\n")
