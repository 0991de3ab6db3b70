"""Copies under way on a device: its stream, what is staged for the kernel, and the event that says they are done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvd.backends.direct_cuda_tables import SHAPES, Job, Rows

WARPS = 8
"""Of a program."""
_LEAST_STAGED = 64 << 10
_ALIGNED = 256


class Flight(Protocol):
    """A copy that was begun. ``seconds`` is how long the device worked on it, known once it is done."""

    def done(self) -> bool:
        """Whether it has ended, without waiting. Raises RuntimeError where the device failed."""
        ...

    @property
    def seconds(self) -> float:
        """How long it took on the device."""
        ...


class Copier(Protocol):
    """What a lane needs of a device."""

    def keep(self, rows: Rows) -> Any:
        """The rows on the device, for any number of `begin`."""
        ...

    def begin(self, rows: Rows, kept: Any | None, job: Job) -> Flight:
        """Start a job; ``kept`` is what `keep` gave for its rows, None to send them along."""
        ...


@dataclass(slots=True, eq=False)
class _Staging:
    host: Any
    device: Any
    bytes: int


@dataclass(slots=True, eq=False)
class _Launched:
    owner: CudaCopier
    staging: _Staging | None
    begun: Any
    end: Any

    def done(self) -> bool:
        if not self.end.query():
            return False
        if self.staging is not None:
            self.owner.recycle(self.staging)
            self.staging = None
        return True

    @property
    def seconds(self) -> float:
        return float(self.begun.elapsed_time(self.end)) / 1e3


class CudaCopier:
    """Launches kernels on one device, on a stream of its own; used from one thread at a time.

    The stream has the lowest priority there is, which is also the default one: what keeps the kernel from slowing
    others down is ``programs``, the number of its thread blocks.
    """

    def __init__(self, ordinal: int, programs: int) -> None:
        import torch

        self._torch = torch
        self._device = torch.device("cuda", ordinal)
        self._programs = programs
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(self._device, priority=0)
        self._free: list[_Staging] = []

    def keep(self, rows: Rows) -> Any:
        """The table on the device: once for a plan, and waited for."""
        torch = self._torch
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            kept = torch.from_numpy(np.ascontiguousarray(rows.table)).to(self._device)
            self._stream.synchronize()
            return kept

    def begin(self, rows: Rows, kept: Any | None, job: Job) -> Flight:
        """Stage the job's words (and the table, where it is not kept) and launch the kernel. Does not wait."""
        torch = self._torch
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            begun, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record(self._stream)
            staging = None
            if job.tiles:
                parts = [job.words] if kept is not None else [rows.table, job.words]
                staging, (*tables, words) = self._stage(parts)
                launch(tables[0] if tables else kept, words, rows, job, self._programs)
            end.record(self._stream)
        return _Launched(self, staging, begun, end)

    def recycle(self, staging: _Staging) -> None:
        """Take back what a launch that has ended was given."""
        self._free.append(staging)

    def _stage(self, parts: Sequence[Any]) -> tuple[_Staging, list[Any]]:
        """Parts in pinned memory, on their way to the device in one copy, and where each stands there."""
        torch = self._torch
        starts = [0]
        for part in parts:
            starts.append(-(-(starts[-1] + part.nbytes) // _ALIGNED) * _ALIGNED)
        staging = self._staging(starts[-1])
        host = staging.host.numpy()
        views = []
        for start, part in zip(starts, parts, strict=False):
            host[start : start + part.nbytes] = part.reshape(-1).view(np.uint8)
            kind = torch.int64 if part.dtype == np.int64 else torch.int32
            views.append(staging.device[start : start + part.nbytes].view(kind))
        staging.device[: starts[-1]].copy_(staging.host[: starts[-1]], non_blocking=True)
        return staging, views

    def _staging(self, size: int) -> _Staging:
        for staging in self._free:
            if staging.bytes >= size:
                self._free.remove(staging)
                return staging
        if self._free:
            self._free.pop()  # too small, and one that is large enough takes its place
        torch, length = self._torch, max(_LEAST_STAGED, 1 << (size - 1).bit_length())
        return _Staging(
            torch.empty(length, dtype=torch.uint8, pin_memory=True),
            torch.empty(length, dtype=torch.uint8, device=self._device),
            length,
        )


def compile_kernels(ordinal: int) -> None:
    """Have a kernel for every shape, so that no request waits for a compiler; Triton keeps them on disk.

    Raises:
        Exception: what Triton or torch raise where they do not work here.
    """
    import torch

    with torch.cuda.device(ordinal):
        nothing = torch.zeros(_ALIGNED, dtype=torch.int64, device=torch.device("cuda", ordinal))
        rows = Rows(np.zeros((5, 0), np.int64), 1, 1, 8, 2)
        for shape in SHAPES:
            launch(nothing, nothing.view(torch.int32), rows, Job(np.zeros(0, np.int32), 0, 0, 0, shape), 1)
        torch.cuda.current_stream().synchronize()


def launch(table: Any, words: Any, rows: Rows, job: Job, programs: int) -> None:
    """Launch the kernel on the current stream of the current device; ``table`` and ``words`` are tensors there."""
    from kvd.backends.direct_cuda_kernel import gather

    shape = job.shape
    gather[(max(1, min(programs, job.tiles)),)](
        table,
        words,
        len(rows),
        job.cells,
        rows.blocks,
        rows.remote_blocks,
        job.segments,
        job.tiles,
        ITEM=shape.item,
        LANES=shape.lanes,
        WIDTH=shape.width,
        PIECES=shape.pieces,
        num_warps=WARPS,
    )
