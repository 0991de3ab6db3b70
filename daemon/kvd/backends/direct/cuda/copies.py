"""Copies under way on a device: its stream, what is staged for the kernel, and the event that says they are done."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvd.backends.direct.cuda import bulk
from kvd.backends.direct.cuda.launch import TRITON_BLOCKS, Arguments, Kernel, Launcher
from kvd.backends.direct.cuda.tables import SHAPES, WASTE, Job, Rows, Shape, job_of_blocks, rows_of
from kvd.backends.errors import BackendError
from kvd.backends.regions import RegisteredMemory
from kvd.geometry.model import Region
from kvd.topology.grid import BlockSelection, Grid, RowBlocks

CLOSE_S = 10.0
"""How long a lane that is closed waits for its copies, which end by themselves in milliseconds."""
LOOK_S = 50e-6
"""Between two looks at a copy that is waited for."""
WARPS = 8
"""Of a program."""
_STAGED = 256 << 10
"""Bytes that a slot has room for at first: the cells of 2 GiB in pieces of 64 KiB."""
_SLOTS = 8
"""At first. A lane that needs another one waits until the device has done what it was told by then."""
_ALIGNED = 256
_PROBED = 100
"""Blocks of the first copy: more pieces than a thread block finds at a time, and than its ring holds."""
_PROBED_ROWS = (3 << 14, (1 << 14) - 16)
_PROBE_BLOCKS = 2

_log = logging.getLogger(__name__)


class Flight(Protocol):
    """A copy that was begun. ``seconds`` is how long the device worked on it, known once it is done."""

    def done(self, *, wait: bool = False) -> bool:
        """Whether it has ended; with ``wait`` when it has. Raises RuntimeError where the device failed."""

    @property
    def seconds(self) -> float:
        """How long it took on the device."""


class LaunchedFlight(Flight, Protocol):
    """A copy by a kernel that was launched."""

    def precede(self, stream: int) -> None:
        """Have the stream wait for it from now on; on any thread. Raises RuntimeError where the device failed."""


def wait_over(flight: Flight, until: float, otherwise: str, *, backend: str) -> None:
    """Wait until nothing of it can land any more, well or not.

    Raises:
        BackendError: ``otherwise``, where that is not so when time.monotonic() is ``until``.
    """
    with suppress(RuntimeError):  # a device that failed runs nothing any more
        while not flight.done():
            if time.monotonic() > until:
                raise BackendError(otherwise, backend=backend)
            time.sleep(LOOK_S)


class Copier(Protocol):
    """What a lane needs of a device. ``waste`` is of its kernel, as `kvd.backends.direct.cuda.tables.WASTE`."""

    waste: float

    def keep(self, rows: Rows) -> Any:
        """The rows on the device, for any number of `begin`."""

    def begin(self, rows: Rows, kept: Any | None, job: Job) -> LaunchedFlight:
        """Start a job; ``kept`` is what `keep` gave for its rows, None to send them along."""


@dataclass(slots=True, eq=False)
class _Slot:
    """Room of ``size`` bytes for what one launch is told, and two events.

    ``memory`` is pinned, on the host ``at`` and on the device ``there``.
    """

    begun: int
    end: int
    memory: tuple[Any, Any]
    size: int
    at: int
    there: int


class CopyEngine:
    """What all copiers of one device share: kernels, and slots that were made before a request waits for them.

    ``triton`` is empty where Triton's kernels can only be launched by itself. ``kernels`` are the same, but for wide
    pieces the one of bulk copies where the device and NVRTC have it; ``waste`` is of that kernel.
    """

    def __init__(self, ordinal: int) -> None:
        """Compile, and launch once.

        Raises:
            Exception: what Triton, torch or the driver raise where they do not work here.
        """
        import torch

        self.ordinal = ordinal
        self.launcher = Launcher(ordinal)
        self.triton: dict[Shape, Kernel] = {}
        self.kernels, self.waste = self.triton, WASTE
        self._torch = torch
        self._device = torch.device("cuda", ordinal)
        self._free: list[_Slot] = []
        self._lock = threading.Lock()
        compiled = compile_kernels(ordinal)
        self._free = [self._made(_STAGED) for _ in range(_SLOTS)]
        try:
            self.kernels = {shape: self.launcher.kernel(found) for shape, found in compiled.items()}
            self._prove()
            self.triton = self.kernels
        except (ValueError, AttributeError, RuntimeError) as error:
            _log.warning("direct reads are launched by Triton, which takes longer: %s", error)
            self.kernels = {}
            self._prove()
        self._take_bulk()

    def _take_bulk(self) -> None:
        """Have wide pieces be bulk copies, if that gives the bytes that it should."""
        capability = self._torch.cuda.get_device_capability(self._device)
        if capability < bulk.LEAST_CAPABILITY:
            return
        try:
            kernel = bulk.kernel(self.launcher, capability)
            self.kernels, self.waste = {**self.triton, bulk.SHAPE: kernel}, bulk.WASTE
            self._prove()
        except (OSError, ValueError, AttributeError, RuntimeError) as error:
            _log.warning(
                "direct reads are copied by Triton's kernel, which is slower than bulk copies: %s", error
            )
            self.kernels, self.waste = self.triton, WASTE

    def take(self, size: int) -> _Slot:
        """A slot with room for ``size`` bytes."""
        with self._lock:
            fitting = next((slot for slot in self._free if slot.size >= size), None)
            if fitting is not None:
                self._free.remove(fitting)
                return fitting
        return self._made(max(_STAGED, 1 << (size - 1).bit_length()))

    def give_back(self, slot: _Slot) -> None:
        """Of a launch that has ended."""
        with self._lock:
            self._free.append(slot)

    def _made(self, size: int) -> _Slot:
        torch = self._torch
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(size, dtype=torch.uint8, device=self._device)
        # torch gives room again as soon as it is free, while kernels of this thread's stream that use it are queued.
        # A copy is on another stream, and would not wait for them.
        torch.cuda.current_stream(self._device).synchronize()
        with self.launcher:
            events = self.launcher.event(), self.launcher.event()
        return _Slot(*events, (host, there), size, int(host.data_ptr()), int(there.data_ptr()))

    def _prove(self) -> None:
        """Copy blocks of rows of several lengths, and raise RuntimeError where other bytes than these are changed."""
        torch = self._torch
        starts, stride = (0, _PROBED_ROWS[0] + 16), sum(_PROBED_ROWS) + 32
        source = torch.arange(1, _PROBED * stride // 8 + 1, dtype=torch.int64, device=self._device)
        target, wanted = torch.zeros_like(source), torch.zeros_like(source)
        blocks = [np.random.default_rng(seed).permutation(_PROBED)[:-1].astype(np.int32) for seed in (1, 2)]
        mine, theirs = (torch.from_numpy(ids.astype(np.int64)).to(self._device) for ids in blocks)
        for start, length in zip(starts, _PROBED_ROWS, strict=True):
            words = slice(start // 8, (start + length) // 8)
            wanted.view(_PROBED, -1)[mine, words] = source.view(_PROBED, -1)[theirs, words]
        torch.cuda.current_stream(self._device).synchronize()
        places = [memory.data_ptr() + np.array(starts, np.int64) for memory in (target, source)]
        apart = np.full(2, stride, np.int64)
        lengths = np.array(_PROBED_ROWS, np.int64)
        grid = Grid(places[0], places[1], lengths, apart, apart, _PROBED, _PROBED)
        sides = [RegisteredMemory([Region(one.data_ptr(), one.nbytes)]) for one in (target, source)]
        rows = rows_of(grid, *sides)
        selection = BlockSelection(grid, (RowBlocks(0, 2, *blocks),), sum(_PROBED_ROWS) * len(blocks[0]))
        copier = CudaCopier(self, _PROBE_BLOCKS)
        for kept in (copier.keep(rows), None):
            target.zero_()
            torch.cuda.current_stream(self._device).synchronize()
            flight = copier.begin(rows, kept, job_of_blocks(rows, selection, self.waste))
            copier.settle()
            if not flight.done() or not bool((target == wanted).all()):
                raise RuntimeError("the kernel copies other bytes than it should")


@functools.cache
def engine(ordinal: int) -> CopyEngine:
    """The one of a device. Raises as `CopyEngine`."""
    return CopyEngine(ordinal)


@dataclass(slots=True, eq=False)
class _Launched:
    engine: CopyEngine
    slot: _Slot | None
    taken: float = 0.0

    def done(self, *, wait: bool = False) -> bool:
        if self.slot is None:
            return True
        launcher = self.engine.launcher
        with launcher:
            if wait:
                launcher.wait(self.slot.end)
            if not launcher.happened(self.slot.end):
                return False
            self.taken = launcher.seconds(self.slot.begun, self.slot.end)
        self.engine.give_back(self.slot)
        self.slot = None
        return True

    def precede(self, stream: int) -> None:
        slot = self.slot  # another thread may see meanwhile that it is done: then a later copy is waited for
        if slot is not None:
            with self.engine.launcher:
                self.engine.launcher.hold(stream, slot.end)

    @property
    def seconds(self) -> float:
        return self.taken


class CudaCopier:
    """Launches kernels on one device, on a stream of its own; used from one thread at a time.

    The stream has the lowest priority there is, which is also the default one: what keeps the kernel from slowing
    others down is ``programs``, the number of its thread blocks; 0 is what suits the kernel.
    """

    def __init__(self, shared: CopyEngine, programs: int, *, bulk_copies: bool = True) -> None:
        """Without ``bulk_copies`` it is Triton's kernel that copies: they are proven between memories of devices."""
        import torch

        self._torch = torch
        self._engine = shared
        self._kernels, self.waste = (shared.kernels, shared.waste) if bulk_copies else (shared.triton, WASTE)
        self._device = torch.device("cuda", shared.ordinal)
        self._programs = programs
        self._arguments = Arguments()
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(self._device, priority=0)
        self._queue = int(self._stream.cuda_stream)

    def keep(self, rows: Rows) -> Any:
        """The table on the device: once for a plan, and waited for."""
        torch = self._torch
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            kept = torch.from_numpy(np.ascontiguousarray(rows.table)).to(self._device)
            self._stream.synchronize()
            return kept

    def begin(self, rows: Rows, kept: Any | None, job: Job) -> LaunchedFlight:
        """Stage the job's words (and the table, where it is not kept) and launch the kernel. Does not wait."""
        packed = job.packed
        second = -(-len(packed) // _ALIGNED) * _ALIGNED
        size = len(packed) if kept is not None else second + rows.table.nbytes
        slot = self._engine.take(size)
        try:
            # As one call that keeps Python's lock, which numpy would let go of.
            ctypes.memmove(slot.at, packed, len(packed))
            if kept is None:
                ctypes.memmove(slot.at + second, rows.table.ctypes.data, rows.table.nbytes)
            self._launch(slot, size, (kept, second), rows, job)
        except BaseException:
            self.settle()  # part of it may have begun
            self._engine.give_back(slot)
            raise
        return _Launched(self._engine, slot)

    def settle(self) -> None:
        """Wait for all that was begun."""
        self._stream.synchronize()

    def _launch(self, slot: _Slot, size: int, table: tuple[Any | None, int], rows: Rows, job: Job) -> None:
        launcher, queue = self._engine.launcher, self._queue
        kernel = self._kernels.get(job.shape)
        programs = min(self._programs or (kernel.blocks if kernel else TRITON_BLOCKS), max(1, job.tiles))
        kept, at = table
        words = slot.there
        with launcher:
            launcher.record(slot.begun, queue)
            if job.tiles:
                launcher.upload(words, slot.at, size, queue)
                if kernel:
                    arguments = self._arguments.put(
                        words + at if kept is None else kept.data_ptr(),
                        words,
                        len(rows),
                        job.segments,
                        job.tiles,
                    )
                    launcher.launch(kernel, programs, arguments, queue)
                else:
                    torch, there = self._torch, slot.memory[1]
                    whole = there[at : at + rows.table.nbytes].view(torch.int64) if kept is None else kept
                    with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                        launch(whole, there.view(torch.int32), rows, job, programs)
            launcher.record(slot.end, queue)


def compile_kernels(ordinal: int) -> dict[Shape, Any]:
    """A kernel for every shape, so that no request waits for a compiler; Triton keeps them on disk.

    Raises:
        Exception: what Triton or torch raise where they do not work here.
    """
    import torch

    with torch.cuda.device(ordinal):
        nothing = torch.zeros(_ALIGNED, dtype=torch.int64, device=torch.device("cuda", ordinal))
        rows = Rows(np.zeros((5, 0), np.int64), 1, 1, 8, 2)
        compiled = {
            shape: launch(nothing, nothing.view(torch.int32), rows, Job(b"", 0, 0, shape), 1)
            for shape in SHAPES
        }
        torch.cuda.current_stream().synchronize()
        return compiled


def launch(table: Any, words: Any, rows: Rows, job: Job, programs: int) -> Any:
    """Have Triton launch the kernel on the current stream of the current device, and give what it compiled for that.

    ``table`` and ``words`` are tensors there.
    """
    from kvd.backends.direct.cuda.kernel import gather

    shape = job.shape
    return gather[(programs,)](
        table,
        words,
        len(rows),
        job.segments,
        job.tiles,
        ITEM=shape.item,
        LANES=shape.lanes,
        WIDTH=shape.width,
        PIECES=shape.pieces,
        num_warps=WARPS,
    )
