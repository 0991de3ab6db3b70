"""Writes a trace, line by line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import BinaryIO

import msgspec

from kvd.geometry.codec import worker_to_plain
from kvd.trace.anonymous import without_addresses
from kvd.trace.model import End, Engine, Header, Line, TracedEngine, Transfer, Worker

_encode = msgspec.json.Encoder().encode


def write_trace(
    out: BinaryIO, header: Header, engines: Iterable[TracedEngine], transfers: Iterable[Transfer]
) -> int:
    """Write a whole trace, geometries without their addresses; returns how many transfers it has."""
    _put(out, header)
    for engine in engines:
        if engine.geometry is None:
            _put(out, msgspec.structs.replace(engine.line, workers=0))
            continue
        clean = without_addresses(engine.geometry)
        _put(
            out,
            Engine(
                engine_id=clean.engine_id,
                generation=clean.generation,
                model=clean.model,
                tp=clean.tp,
                pp=clean.pp,
                dcp=clean.dcp,
                facts=clean.facts,
                workers=len(clean.workers),
            ),
        )
        for worker in clean.workers:
            _put(out, Worker(geometry=worker_to_plain(worker)))
    count = 0
    for transfer in transfers:
        _put(out, transfer)
        count += 1
    _put(out, End(transfers=count))
    return count


def _put(out: BinaryIO, line: Line) -> None:
    out.write(_encode(line))
    out.write(b"\n")
