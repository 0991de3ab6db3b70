"""A GPU that is none: its memory is the host's, its driver maps memfds, its kernel is written out in Python.

What `run_job` does to memory is what the kernel is to do; tests compare both with plans applied byte by byte.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvd.backends.cuda.driver import CudaError
from kvd.backends.direct.cuda.tables import SEGMENT_WORDS, WASTE, Job, Rows
from kvd.backends.direct.memfd import Backing, MemfdView
from kvd.geometry.model import Region


def run_job(rows: Rows, job: Job) -> int:
    """Copy all tiles of a job; gives the bytes copied. Every tile must belong to one segment."""
    header = job.words[: SEGMENT_WORDS * job.segments].reshape(-1, SEGMENT_WORDS)
    step = job.shape.item * job.shape.lanes
    copied = 0
    for tile in range(job.tiles):
        segment = int(np.searchsorted(header[:, 0], tile, side="right")) - 1
        first_tile, pieces, per, blocks, first_row, row_step, ids, apart = map(int, header[segment])
        begin = (tile - first_tile) * job.shape.pieces
        assert begin < pieces
        for number in range(begin, min(begin + job.shape.pieces, pieces)):
            cell, begun = number // per, number % per * job.shape.width
            nth, listed = divmod(cell, blocks)
            local, remote, length, stride, remote_stride = map(int, rows.table[:, first_row + nth * row_step])
            to = local + int(job.words[ids + listed]) * stride + begun
            source = remote + int(job.words[ids + listed + apart]) * remote_stride + begun
            count = min(length - begun, job.shape.width)
            assert to % step == source % step == count % step == 0
            ctypes.memmove(to, source, count)
            copied += count
    return copied


@dataclass(eq=False)
class MadeUpDriver:
    """Devices by uuid; memory of others is mapped by the handles that `handle_of` makes. Counts what is open."""

    uuid: str = "gpu-a"
    visible: dict[str, int] = field(default_factory=lambda: {"gpu-a": 0, "gpu-b": 1})
    unreachable: set[int] = field(default_factory=set)
    allocations: list[Region] = field(default_factory=list)
    kind: str = "handle"
    ordinal: int = 0
    open: dict[int, MemfdView] = field(default_factory=dict)
    opened: int = 0
    refuses: str = ""

    def others(self) -> dict[str, int]:
        return self.visible

    def reaches(self, ordinal: int) -> bool:
        return ordinal not in self.unreachable

    def allocation(self, address: int) -> Region:
        for span in self.allocations:
            if span.address <= address < span.address + span.length:
                return span
        raise CudaError("cuMemGetAddressRange_v2", 1, "invalid argument")

    def shares_by_handle(self, _address: int) -> bool:
        return self.kind == "handle"

    def shares_by_descriptor(self, _address: int) -> bool:
        return self.kind == "descriptor"

    def handle(self, base: int) -> bytes:
        return f"handle of {base:#x}".encode()

    def export(self, _address: int) -> int:
        self.opened += 1
        return os.open("/dev/null", os.O_RDONLY)

    def open_handle(self, handle: bytes) -> int:
        if self.refuses:
            raise CudaError("cuIpcOpenMemHandle_v2", 1, self.refuses)
        pid, inode, fd, offset, length = json.loads(handle)
        window = MemfdView(pid, Backing(fd, offset, inode), length)
        self.open[window.address] = window
        self.opened += 1
        return window.address

    def close_handle(self, address: int) -> None:
        self.open.pop(address).close()


def handle_of(pid: int, memory: Backing, length: int) -> bytes:
    return json.dumps([pid, memory.inode, memory.fd, memory.offset, length]).encode()


@dataclass(eq=False)
class MadeUpFlight:
    rows: Rows
    job: Job
    held: bool
    broken: str = ""
    seconds: float = 0.25
    copied: int = -1
    waited: bool = False
    before: list[int] = field(default_factory=list)
    """The streams that wait for it."""

    def done(self, *, wait: bool = False) -> bool:
        self.waited = wait
        if self.broken:
            raise RuntimeError(self.broken)
        if self.held:
            return False
        if self.copied < 0:
            self.copied = run_job(self.rows, self.job)
        return True

    def precede(self, stream: int) -> None:
        if self.broken:
            raise RuntimeError(self.broken)
        self.before.append(stream)


@dataclass(eq=False)
class MadeUpCopier:
    """Copies when it is asked whether it has; with ``held`` not before it is let go."""

    waste: float = WASTE
    held: bool = False
    kept: list[Rows] = field(default_factory=list)
    flights: list[MadeUpFlight] = field(default_factory=list)
    refuses: str = ""

    def keep(self, rows: Rows) -> Any:
        self.kept.append(rows)
        return len(self.kept)

    def begin(self, rows: Rows, kept: Any | None, job: Job) -> MadeUpFlight:
        if self.refuses:
            raise RuntimeError(self.refuses)
        assert kept is None or self.kept[kept - 1] is rows
        self.flights.append(MadeUpFlight(rows, job, self.held))
        return self.flights[-1]

    def let_go(self, flights: Sequence[MadeUpFlight] = ()) -> None:
        for flight in flights or self.flights:
            flight.held = False
