"""The driver's calls that one copy takes, made without letting go of the GIL, but for the one that waits.

In a worker other threads run Python without pause. A call that lets go of the GIL waits to have it back, 20 to 100 us
each time; torch and Triton let go of it some fifteen times for one launch. The calls here return in about a
microsecond and wait for nothing, so they keep it.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace
from typing import Any

from kvd.backends.cuda.driver import call, context, failed, holding
from kvd.backends.cuda.driver import library as yielding

_NOT_READY = 600
_INVALID_VALUE = 1
_WARP = 32
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
TRITON_BLOCKS = 64
"""Thread blocks of a copy by Triton's kernel: what fills NVLink in as few as can be."""
_int, _float, _size, _u64, _ptr = (
    ctypes.c_int,
    ctypes.c_float,
    ctypes.c_size_t,
    ctypes.c_uint64,
    ctypes.c_void_p,
)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuCtxPushCurrent_v2": (_ptr,),
    "cuCtxPopCurrent_v2": (_ptr,),
    "cuEventCreate": (_ptr, ctypes.c_uint),
    "cuEventRecord": (_ptr, _ptr),
    "cuStreamWaitEvent": (_ptr, _ptr, ctypes.c_uint),
    "cuEventQuery": (_ptr,),
    "cuEventElapsedTime": (_ptr, _ptr, _ptr),
    "cuMemcpyHtoDAsync_v2": (_u64, _ptr, _size, _ptr),
    "cuFuncGetParamInfo": (_ptr, _size, _ptr, _ptr),
    "cuLaunchKernel": (_ptr, *(ctypes.c_uint,) * 7, _ptr, _ptr, _ptr),
    "cuModuleLoadData": (_ptr, ctypes.c_char_p),
    "cuModuleGetFunction": (_ptr, _ptr, ctypes.c_char_p),
    "cuFuncSetAttribute": (_ptr, _int, _int),
    "cuGetErrorString": (_int, _ptr),
}


class Arguments(ctypes.Structure):
    """What `kvd.backends.direct.cuda.kernel.gather` and ``bulk.cu`` take, in order; Triton's compiler adds ``scratch``.

    Made once and set for each launch, which has taken them when it returns.
    """

    _fields_ = (
        ("table", _u64),
        ("words", _u64),
        ("rows", ctypes.c_int32),
        ("segments", ctypes.c_int32),
        ("tiles", ctypes.c_int32),
        ("scratch", _u64 * 2),
    )

    def __init__(self) -> None:
        """All are 0."""
        super().__init__()
        start = ctypes.addressof(self)
        self.places = (_ptr * len(_OFFSETS))(*(start + offset for offset in _OFFSETS))

    def put(self, table: int, words: int, rows: int, segments: int, tiles: int) -> Arguments:
        """Set them."""
        self.table, self.words = table, words
        self.rows, self.segments, self.tiles = rows, segments, tiles
        return self


_SIZES = (8, 8, 4, 4, 4)
_OFFSETS = (0, 8, 16, 20, 24, 32, 40)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel that was loaded: the driver's handle of it, bytes of shared memory and threads of a block.

    ``blocks`` is how many thread blocks suit it.
    """

    function: int
    shared: int
    threads: int
    blocks: int = TRITON_BLOCKS


class Launcher:
    """What the driver does for copies on one device, the device's context made current around each group of calls."""

    def __init__(self, ordinal: int, library: Any = None) -> None:
        """``library`` is the driver's, to be left out but in tests.

        Raises:
            AttributeError: the driver lacks a call.
            BackendError: as `kvd.backends.cuda.driver.context`.
        """
        self._context = context(ordinal) if library is None else _ptr(0)
        self._wait = (library or yielding()).cuEventSynchronize
        self._cuda = cuda = library or _library()
        self._push, self._pop = cuda.cuCtxPushCurrent_v2, cuda.cuCtxPopCurrent_v2
        self._record, self._query = cuda.cuEventRecord, cuda.cuEventQuery
        self._upload, self._launch = cuda.cuMemcpyHtoDAsync_v2, cuda.cuLaunchKernel
        self._popped = ctypes.byref(_ptr())

    def __enter__(self) -> None:
        """Make the context current in which all other calls are to be made."""
        self._check("cuCtxPushCurrent_v2", self._push(self._context))

    def __exit__(self, *_: object) -> None:
        """Have the one from before again."""
        self._check("cuCtxPopCurrent_v2", self._pop(self._popped))

    def event(self) -> int:
        """A new event."""
        made = _ptr()
        self._call("cuEventCreate", ctypes.byref(made), 0)
        return int(made.value or 0)

    def record(self, event: int, stream: int) -> None:
        """Have the event happen when the stream has come this far."""
        self._check("cuEventRecord", self._record(event, stream))

    def hold(self, stream: int, event: int) -> None:
        """Have the stream go no further before the event, as it was recorded last, has happened."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def happened(self, event: int) -> bool:
        """Whether it has."""
        number = self._query(event)
        if number == _NOT_READY:
            return False
        self._check("cuEventQuery", number)
        return True

    def wait(self, event: int) -> None:
        """Wait until it has; others run Python meanwhile."""
        self._check("cuEventSynchronize", self._wait(_ptr(event)))

    def seconds(self, first: int, last: int) -> float:
        """Between two events that have happened."""
        passed = _float()
        self._call("cuEventElapsedTime", ctypes.byref(passed), first, last)
        return float(passed.value) / 1e3

    def upload(self, to: int, source: int, size: int, stream: int) -> None:
        """Copy pinned memory of the host to the device."""
        self._check("cuMemcpyHtoDAsync_v2", self._upload(to, source, size, stream))

    def launch(self, kernel: Kernel, programs: int, arguments: Arguments, stream: int) -> None:
        """Launch so many programs."""
        threads, shared, places = kernel.threads, kernel.shared, arguments.places
        number = self._launch(kernel.function, programs, 1, 1, threads, 1, 1, shared, stream, places, None)
        self._check("cuLaunchKernel", number)

    def load(self, code: bytes, name: str, like: Kernel) -> Kernel:
        """The kernel ``name`` of machine code, loaded until the process ends; it takes `Arguments`, but no scratch.

        Raises:
            CudaError: the device does not run it, or has not so much shared memory.
        """
        module, function = _ptr(), _ptr()
        with self:
            self._call("cuModuleLoadData", ctypes.byref(module), code)
            self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
            self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, like.shared)
        return replace(like, function=int(function.value or 0))

    def kernel(self, compiled: Any) -> Kernel:
        """What Triton compiled and loaded, if its parameters are what `launch` gives them.

        Raises:
            ValueError: they are not, and what was seen.
            AttributeError: the driver cannot say.
        """
        told = compiled.metadata
        for name in ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"):
            if getattr(told, name, 0):
                raise ValueError(f"it wants {name} {getattr(told, name)}")
        sizes: list[int] = []
        while len(sizes) <= len(_OFFSETS):
            offset, size = _size(), _size()
            number = int(
                self._cuda.cuFuncGetParamInfo(
                    compiled.function, len(sizes), ctypes.byref(offset), ctypes.byref(size)
                )
            )
            if number == _INVALID_VALUE:
                break
            if number:
                raise failed(self._cuda, "cuFuncGetParamInfo", number)
            sizes.append(size.value)
        scratch = sizes[len(_SIZES) :]
        if tuple(sizes[: len(_SIZES)]) != _SIZES or len(scratch) > 2 or set(scratch) - {8}:
            raise ValueError(f"its parameters have {sizes} bytes")
        return Kernel(int(compiled.function), int(told.shared), int(told.num_warps) * _WARP)

    def _call(self, name: str, *arguments: Any) -> None:
        call(self._cuda, name, *arguments)

    def _check(self, name: str, number: int) -> None:
        if number:
            raise failed(self._cuda, name, number)


@functools.cache
def _library() -> Any:
    library = holding()
    for name, takes in _SIGNATURES.items():
        # What a driver lacks is an error to who calls it: those before 12.4 have no cuFuncGetParamInfo.
        if hasattr(library, name):
            getattr(library, name).argtypes = takes
    return library
