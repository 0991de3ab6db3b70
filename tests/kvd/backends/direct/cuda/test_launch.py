"""The driver's calls of one copy, on a made-up driver: what a kernel is given, and which kernels are refused."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvd.backends.cuda.driver import CudaError
from kvd.backends.direct.cuda import launch as module
from kvd.backends.direct.cuda.copies import CopyEngine, CudaCopier
from kvd.backends.direct.cuda.launch import Arguments, Kernel, Launcher
from kvd.backends.direct.cuda.tables import SHAPES, WASTE, job_of_descriptors
from kvd.topology.descriptors import Descriptors

SIZES = (8, 8, 4, 4, 4, 8, 8)


@dataclass
class MadeUpLibrary:
    """Notes what it is called for; uploads are copied, as all memory is the host's."""

    sizes: tuple[int, ...] = SIZES
    pending: bool = False
    fails: dict[str, int] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    depth: int = 0
    events: int = 0
    launched: dict[str, Any] = field(default_factory=dict)
    waits: list[tuple[int, int, int]] = field(default_factory=list)
    """Streams with the events that they wait for."""
    loaded: tuple[Any, ...] = ()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            assert self.depth or name in ("cuCtxPushCurrent_v2", "cuFuncGetParamInfo", "cuGetErrorString")
            if name in self.fails:
                return self.fails[name]
            return int(getattr(self, "_" + name.partition("_")[0])(*arguments) or 0)

        return call

    def _cuCtxPushCurrent(self, _context: Any) -> None:  # noqa: N802 - the driver's names
        self.depth += 1

    def _cuCtxPopCurrent(self, _context: Any) -> None:  # noqa: N802
        self.depth -= 1

    def _cuEventCreate(self, made: Any, _flags: int) -> None:  # noqa: N802
        self.events += 1
        made._obj.value = self.events

    def _cuEventRecord(self, _event: int, _stream: int) -> None:  # noqa: N802
        pass

    def _cuStreamWaitEvent(self, *arguments: int) -> None:  # noqa: N802
        self.waits.append((arguments[0], arguments[1], arguments[2]))

    def _cuEventQuery(self, _event: int) -> int:  # noqa: N802
        return 600 if self.pending else 0

    def _cuEventSynchronize(self, _event: Any) -> None:  # noqa: N802
        self.pending = False

    def _cuEventElapsedTime(self, passed: Any, _first: int, _last: int) -> None:  # noqa: N802
        passed._obj.value = 2.0

    def _cuMemcpyHtoDAsync(self, to: int, source: int, size: int, _stream: int) -> None:  # noqa: N802
        ctypes.memmove(to, source, size)

    def _cuFuncGetParamInfo(self, _function: int, index: int, _offset: Any, size: Any) -> int:  # noqa: N802
        if index >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[index]
        return 0

    def _cuLaunchKernel(self, function: int, *rest: Any) -> None:  # noqa: N802
        grid, block, shared, stream, pointers = rest[:3], rest[3:6], rest[6], rest[7], rest[8]
        kinds = [ctypes.c_uint64] * 2 + [ctypes.c_int32] * 3 + [ctypes.c_uint64] * 2
        values = [
            ctypes.cast(p, ctypes.POINTER(k)).contents.value for p, k in zip(pointers, kinds, strict=True)
        ]
        self.launched = {
            "function": function, "grid": grid, "block": block, "shared": shared, "stream": stream, "values": values
        }  # fmt: skip

    def _cuModuleLoadData(self, module: Any, code: bytes) -> None:  # noqa: N802
        module._obj.value, self.loaded = 6, (code,)

    def _cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> None:  # noqa: N802
        assert module.value == 6
        function._obj.value = 7
        self.loaded = (*self.loaded, name)

    def _cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> None:  # noqa: N802
        self.loaded = (*self.loaded, function.value, attribute, value)

    def _cuGetErrorString(self, _number: int, words: Any) -> None:  # noqa: N802
        words._obj.value = b"made up"


def compiled(**metadata: Any) -> Any:
    known = {"shared": 64, "num_warps": 8, "global_scratch_size": 0, **metadata}
    return SimpleNamespace(function=77, metadata=SimpleNamespace(**known))


def test_a_kernel_gets_its_arguments_in_order() -> None:
    library = MadeUpLibrary()
    launcher = Launcher(0, library)
    with launcher:
        launcher.launch(Kernel(77, 64, 256), 5, Arguments().put(1 << 40, 1 << 41, 3, 4, 5), 9)
    assert library.launched == {
        "function": 77,
        "grid": (5, 1, 1),
        "block": (256, 1, 1),
        "shared": 64,
        "stream": 9,
        "values": [1 << 40, 1 << 41, 3, 4, 5, 0, 0],
    }
    assert library.depth == 0


@pytest.mark.parametrize("sizes", [SIZES, SIZES[:6], SIZES[:5]])
def test_a_kernel_of_triton_is_taken_with_its_scratch_or_without(sizes: tuple[int, ...]) -> None:
    assert Launcher(0, MadeUpLibrary(sizes)).kernel(compiled()) == Kernel(77, 64, 256)


@pytest.mark.parametrize(
    ("sizes", "metadata", "says"),
    [
        ((8, 8, 8, 4, 4), {}, r"its parameters have \[8, 8, 8, 4, 4\] bytes"),
        ((*SIZES, 8), {}, "its parameters have"),
        ((*SIZES[:6], 4), {}, "its parameters have"),
        (SIZES[:4], {}, "its parameters have"),
        (SIZES, {"global_scratch_size": 128}, "it wants global_scratch_size 128"),
        (SIZES, {"launch_pdl": True}, "it wants launch_pdl True"),
    ],
)
def test_a_kernel_with_other_parameters_is_not_launched(
    sizes: tuple[int, ...], metadata: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Launcher(0, MadeUpLibrary(sizes)).kernel(compiled(**metadata))


def test_a_driver_that_cannot_tell_of_parameters_is_asked_for_all_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {name: SimpleNamespace() for name in module._SIGNATURES if name != "cuFuncGetParamInfo"}
    monkeypatch.setattr(module, "holding", lambda: SimpleNamespace(cuEventSynchronize=None, **known))
    library = module._library.__wrapped__()
    assert library.cuLaunchKernel.argtypes == module._SIGNATURES["cuLaunchKernel"]
    with pytest.raises(AttributeError, match="cuFuncGetParamInfo"):
        Launcher(0, library).kernel(compiled())


def test_an_error_has_the_drivers_words_and_leaves_no_context() -> None:
    library = MadeUpLibrary(fails={"cuEventRecord": 700})
    launcher = Launcher(0, library)
    with pytest.raises(CudaError, match=r"cuEventRecord: made up \(700\)"), launcher:
        launcher.record(1, 2)
    assert library.depth == 0


def test_a_stream_is_held_until_an_event_has_happened() -> None:
    library = MadeUpLibrary()
    launcher = Launcher(0, library)
    with launcher:
        launcher.hold(9, 4)
    assert library.waits == [(9, 4, 0)]
    assert library.depth == 0


class MadeUpEngine:
    """An engine whose device's memory is the host's."""

    def __init__(self, library: MadeUpLibrary) -> None:
        self.ordinal, self.launcher = 0, Launcher(0, library)
        self.kernels, self.waste = {shape: Kernel(77, 0, 256) for shape in SHAPES}, WASTE
        self.given_back = 0

    def take(self, size: int) -> Any:
        host, there = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        return SimpleNamespace(
            begun=1, end=2, memory=(host, there), size=size, at=host.ctypes.data, there=there.ctypes.data
        )

    def give_back(self, _slot: Any) -> None:
        self.given_back += 1


def copier(engine: Any) -> CudaCopier:
    made = CudaCopier.__new__(CudaCopier)
    made._engine, made._queue, made._programs, made._arguments = engine, 9, 64, Arguments()
    made._kernels, made.waste = engine.kernels, engine.waste
    made._stream = SimpleNamespace(synchronize=lambda: None)
    return made


ROWS, JOB = job_of_descriptors(
    Descriptors(
        *(np.array(column, np.int64) for column in ([1 << 20, 1 << 21], [1 << 30, 1 << 31], [4096, 4096]))
    )
)


def test_a_launch_has_its_words_and_its_table_and_seconds_once_it_is_done() -> None:
    library = MadeUpLibrary()
    engine = MadeUpEngine(library)
    flight = copier(engine).begin(ROWS, None, JOB)
    table, words, *numbers = library.launched["values"]
    assert numbers == [2, JOB.segments, JOB.tiles, 0, 0]
    assert ctypes.string_at(words, len(JOB.packed)) == JOB.packed
    assert ctypes.string_at(table, ROWS.table.nbytes) == ROWS.table.tobytes()
    library.pending = True
    assert not flight.done()
    library.pending = False
    assert flight.done()
    assert flight.done()
    assert (flight.seconds, engine.given_back) == (0.002, 1)


def test_a_launch_can_be_waited_for() -> None:
    library = MadeUpLibrary()
    flight = copier(MadeUpEngine(library)).begin(ROWS, None, JOB)
    library.pending = True
    assert not flight.done()
    assert flight.done(wait=True)


def test_a_stream_waits_for_the_end_of_a_launch_that_is_not_seen_to_be_over() -> None:
    library = MadeUpLibrary(pending=True)
    flight = copier(MadeUpEngine(library)).begin(ROWS, None, JOB)
    flight.precede(5)
    assert not flight.done()
    flight.precede(6)
    assert library.waits == [(5, 2, 0), (6, 2, 0)], "the second of its events, whoever waits"
    library.pending = False
    assert flight.done()
    flight.precede(7)
    assert len(library.waits) == 2, "by then its events may be another launch's"
    assert library.depth == 0


def test_a_stream_that_cannot_wait_for_a_launch_says_so() -> None:
    library = MadeUpLibrary(fails={"cuStreamWaitEvent": 400})
    flight = copier(MadeUpEngine(library)).begin(ROWS, None, JOB)
    with pytest.raises(CudaError, match=r"cuStreamWaitEvent: made up \(400\)"):
        flight.precede(5)
    assert library.depth == 0


def test_room_for_a_launch_is_used_once_nothing_queued_may_still_use_it() -> None:
    """torch gives room again that was freed on a stream, and only what is on that stream comes after its last use."""
    done: list[str] = []

    def room(_size: int, **where: Any) -> Any:
        done.append("room on the host" if "pin_memory" in where else "room on the device")
        return SimpleNamespace(data_ptr=lambda: 1)

    stream = SimpleNamespace(synchronize=lambda: done.append("wait"))
    engine = CopyEngine.__new__(CopyEngine)
    engine.launcher, engine._device = Launcher(0, MadeUpLibrary()), "cuda:0"
    cuda = SimpleNamespace(current_stream=lambda _device: stream)
    engine._torch = SimpleNamespace(empty=room, uint8=np.uint8, cuda=cuda)
    engine._made(256)
    assert done == ["room on the host", "room on the device", "wait"]


def test_a_launch_that_is_refused_gives_its_slot_back() -> None:
    engine = MadeUpEngine(MadeUpLibrary(fails={"cuLaunchKernel": 719}))
    with pytest.raises(CudaError, match="cuLaunchKernel"):
        copier(engine).begin(ROWS, None, JOB)
    assert engine.given_back == 1
