"""The kernel of direct reads in CUDA C++ (``bulk.cu``), for devices with bulk copies: Hopper and later.

NVRTC compiles it, which torch brings along, in a fraction of a second, whenever a worker registers memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvd.backends.direct.cuda.launch import Kernel, Launcher
from kvd.backends.direct.cuda.tables import SEGMENT_WORDS, SHAPES

SOURCE = Path(__file__).with_name("bulk.cu")
SHAPE = SHAPES[0]
"""What it is for: wide pieces, one in a tile, of what is a multiple of 16."""
LEAST_CAPABILITY = (9, 0)
STAGES, LAG = 8, 2
"""Pieces in the ring of a thread block, and how many of them may be on their way out while others come in."""
BLOCKS = 16
"""Thread blocks of a copy: they fill NVLink, and more take as long."""
WASTE = 2.0
"""As `kvd.backends.direct.cuda.tables.WASTE`: only bytes that are there are moved, so pieces of 8 KiB are enough."""
_THREADS = 32
_ptr, _size, _int, _text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "nvrtcCreateProgram": (_ptr, _text, _text, _int, _ptr, _ptr),
    "nvrtcCompileProgram": (_ptr, _int, _ptr),
    "nvrtcGetProgramLogSize": (_ptr, _ptr),
    "nvrtcGetProgramLog": (_ptr, _ptr),
    "nvrtcGetCUBINSize": (_ptr, _ptr),
    "nvrtcGetCUBIN": (_ptr, _ptr),
    "nvrtcDestroyProgram": (_ptr,),
}


def defines() -> dict[str, int]:
    """The numbers that the source is compiled with."""
    return {"CHUNK": SHAPE.width, "STAGES": STAGES, "LAG": LAG, "SEGMENT": SEGMENT_WORDS}


def kernel(launcher: Launcher, capability: tuple[int, int]) -> Kernel:
    """Compile and load it.

    Raises:
        OSError: there is no NVRTC.
        ValueError: NVRTC does not compile it, with its own words.
        CudaError: the driver does not take it.
    """
    library = nvrtc()
    code = compiled(library, f"sm_{capability[0]}{capability[1]}", SOURCE, defines())
    return launcher.load(code, "bulk", Kernel(0, SHAPE.width * STAGES, _THREADS, BLOCKS))


def nvrtc() -> Any:
    """NVRTC: that of torch's own CUDA, else one that the system finds.

    Raises:
        OSError: there is none.
    """
    import torch

    major = str(torch.version.cuda or "").partition(".")[0]
    packages = Path(torch.__file__).parents[1] / "nvidia"
    known = [str(path) for path in sorted(packages.glob(f"*/lib/libnvrtc.so.{major or '*'}"))]
    failed = OSError("torch was built without CUDA")
    for name in [*known, *([f"libnvrtc.so.{major}"] if major else [])]:
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            failed = error
            continue
        for call, takes in _SIGNATURES.items():
            getattr(library, call).argtypes = takes
        return library
    raise failed


def compiled(library: Any, architecture: str, source: Path, numbers: Mapping[str, int]) -> bytes:
    """A source with these numbers as machine code (a cubin), which needs nothing of the driver but to load it.

    Raises:
        ValueError: it does not compile.
    """
    program, size = _ptr(), _size()
    told = [f"--gpu-architecture={architecture}", "--std=c++17"]
    told += [f"-D{name}={value}" for name, value in numbers.items()]
    options = (_text * len(told))(*(one.encode() for one in told))
    text = source.read_bytes()
    if failed := library.nvrtcCreateProgram(ctypes.byref(program), text, source.name.encode(), 0, None, None):
        raise ValueError(f"nvrtcCreateProgram gives {failed}")
    try:
        if failed := library.nvrtcCompileProgram(program, len(told), options):
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(max(1, size.value))
            library.nvrtcGetProgramLog(program, log)
            raise ValueError(f"NVRTC gives {failed} for {architecture}: {log.value.decode().strip()[-1000:]}")
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
