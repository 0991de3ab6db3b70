"""Copies by the driver: one for all, a call for each piece, and many pieces in a call."""
# ruff: noqa: T201 - a script that prints

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.peer_rates.pair import MIB, PIECES, SIZES, Pair, forked, ok

_u64, _size, _int, _uint, _ptr = (
    ctypes.c_uint64,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_void_p,
)


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("order", _int),
        ("source", _int * 2),
        ("target", _int * 2),
        ("flags", _uint),
    )


def plain(pair: Pair) -> None:
    """One copy."""
    for size in SIZES:

        def run(size: int = size) -> None:
            ok(
                pair.cuda.cuMemcpyDtoDAsync_v2(
                    pair.here.data_ptr(), pair.there.data_ptr(), size, pair.streams[0].cuda_stream
                ),
                "cuMemcpyDtoDAsync",
            )

        pair.measure("plain", size, size, run, None)


def addresses(pair: Pair, piece: int, size: int) -> tuple[Any, Any, tuple[Any, Any]]:
    """Of all pieces here and there, and their block ids."""
    ids = pair.chosen(piece, size)
    here, there = (
        memory.data_ptr() + of.astype(np.int64) * piece
        for memory, of in zip((pair.here, pair.there), ids, strict=True)
    )
    return here, there, ids


def each(pair: Pair) -> None:
    """A call for each piece."""
    for size, streams in ((SIZES[0], 1), (SIZES[0], 2), (SIZES[0], 4), (SIZES[1], 4)):
        here, there, ids = addresses(pair, MIB, size)
        rows = list(zip(here.tolist(), there.tolist(), strict=True))

        def run(rows: Any = rows, streams: int = streams) -> None:
            def post(number: int, stream: int) -> None:
                for to, source in rows[number::streams]:
                    ok(pair.cuda.cuMemcpyDtoDAsync_v2(to, source, MIB, stream), "cuMemcpyDtoDAsync")

            forked(pair, streams, post)

        pair.measure(f"each {streams} streams", MIB, size, run, ids)


def batch_call(cuda: Any) -> tuple[Callable[..., int], bool]:
    """`cuMemcpyBatchAsync`, and whether it is the older one that also tells which copy failed."""
    for name, version, older in (
        ("cuMemcpyBatchAsync_v2", 13000, False),
        ("cuMemcpyBatchAsync", 13000, False),
        ("cuMemcpyBatchAsync", 12080, True),
    ):
        found, status = _ptr(), _int()
        failed = cuda.cuGetProcAddress_v2(
            name.encode(), ctypes.byref(found), _int(version), _u64(0), ctypes.byref(status)
        )
        if not failed and found.value:
            more = (_ptr,) if older else ()
            kind = ctypes.CFUNCTYPE(_int, _ptr, _ptr, _ptr, _size, _ptr, _ptr, _size, *more, _ptr)
            return kind(found.value), older
    raise RuntimeError("this driver has no cuMemcpyBatchAsync")


def dealt(columns: tuple[Any, ...], streams: int, chunks: int) -> list[list[tuple[Any, ...]]]:
    """For each stream its chunks of the columns."""
    return [
        [
            tuple(np.ascontiguousarray(column[at :: streams * chunks]) for column in columns)
            for at in range(one, streams * chunks, streams)
        ]
        for one in range(streams)
    ]


def batch(pair: Pair) -> None:
    """Many pieces in one call."""
    try:
        call, older = batch_call(pair.cuda)
    except (RuntimeError, AttributeError) as error:
        print("batch FAILED", error)
        return
    print(f"# cuMemcpyBatchAsync {'12.8' if older else '13'}")
    first = np.zeros(1, np.uint64)
    ways = [(streams, 3, 1, 1) for streams in (1, 2, 4)] + [(1, 1, 0, 1), (2, 3, 0, 1), (2, 3, 1, 8)]
    for piece in PIECES:
        for streams, order, flags, chunks in ways:
            if piece != MIB and (order == 1 or chunks > 1 or not flags):
                continue
            for size in SIZES:
                here, there, ids = addresses(pair, piece, size)
                here, there = here.astype(np.uint64), there.astype(np.uint64)
                columns = here, there, np.full(len(here), piece, np.uint64)
                parts = dealt(columns, streams, chunks)
                told = _Attributes(order=order, flags=flags)

                def run(parts: Any = parts, streams: int = streams, told: Any = told) -> None:
                    def post(number: int, stream: int) -> None:
                        for to, source, length in parts[number]:
                            told_of = (to.ctypes.data, source.ctypes.data, length.ctypes.data, len(to))
                            more = (ctypes.byref(_size()),) if older else ()
                            ok(
                                call(*told_of, ctypes.byref(told), first.ctypes.data, 1, *more, stream),
                                "cuMemcpyBatchAsync",
                            )

                    forked(pair, streams, post)

                name = f"batch {streams} streams order {order} flags {flags} chunks {chunks}"
                pair.measure(name, piece, size, run, ids)
