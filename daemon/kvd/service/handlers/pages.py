"""Long lists in pages: as many rows as an answer may hold, and where to ask on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias, TypeVar

import msgspec

from kvd.service.errors import RequestRefused
from kvd.service.fairness.queue import Path
from kvd.service.slices import Slices
from kvd.service.sockets.router import Caller

PAGE_ROWS = 2048
"""Most rows of one answer: more than a host of 64 engines has, and made in some milliseconds."""
PAGE_BYTES = 4 << 20
"""Bytes of rows after which an answer ends: a quarter of what other kvds take in one message."""

RowPlace = TypeVar("RowPlace")
PlacedRows: TypeAlias = Iterator[tuple[RowPlace, msgspec.Struct] | None]
"""Rows with their places in the list, in its order; None while the next one is looked for."""

_ENCODER = msgspec.msgpack.Encoder()


def whose(caller: Caller) -> Path:
    """In whose turn a caller's answers are made: his process's among those of his user, or his host's."""
    return (caller.key, "") if caller.key else (caller.uid, caller.pid)


async def page(slices: Slices, caller: Caller, rows: PlacedRows[Any]) -> tuple[tuple[Any, ...], str]:
    """The first rows, as they stand on the wire, and the place after which there are more, or empty."""
    found = await slices.collect(_fitting(rows), whose(caller))
    if not found or next((row for row in rows if row is not None), None) is None:
        return tuple(raw for _, raw in found), ""
    return tuple(raw for _, raw in found), msgspec.json.encode(found[-1][0]).decode()


def place(text: str, decoder: msgspec.json.Decoder[RowPlace]) -> RowPlace | None:
    """The place that an asker goes on from, None at the beginning. Raises `RequestRefused` for what is no place."""
    if not text:
        return None
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise RequestRefused(
            "KVD-BAD-QUERY",
            f"after {text[:80]!r} nothing can come",
            hint="give what the last answer had as `more`",
        ) from None


def _fitting(rows: PlacedRows[RowPlace]) -> Iterator[tuple[RowPlace, msgspec.Raw] | None]:
    count = size = 0
    for row in rows:
        if row is None:
            yield None
            continue
        raw = msgspec.Raw(_ENCODER.encode(row[1]))
        count, size = count + 1, size + len(raw)
        yield row[0], raw
        if count == PAGE_ROWS or size >= PAGE_BYTES:
            return
