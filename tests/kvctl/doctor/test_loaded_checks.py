"""What processes have mapped, as the kernel says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvctl.doctor.loaded_checks import loaded_checks
from kvctl.views.doctor import Check

LOADS = """
import ctypes, sys
loaded = [ctypes.CDLL(path) for path in sys.argv[1:]]
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def loading(*libraries: Path) -> Iterator[int]:
    """A process that has loaded these; its pid. They are copies of a library of Python's, under other names."""
    import _ctypes

    for library in libraries:
        library.parent.mkdir(exist_ok=True)
        shutil.copy(_ctypes.__file__, library)
    with subprocess.Popen(
        [sys.executable, "-c", LOADS, *map(str, libraries)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate()


def checks(pid: int) -> dict[str, Check]:
    return {check.code: check for check in loaded_checks((pid,))}


def test_ucx_that_is_loaded_twice_is_told_with_both_files(tmp_path: Path) -> None:
    wheel, system = tmp_path / "nixl_cu12.libs/libucp-8ae1f7.so.0.0.0", tmp_path / "lib/libucp.so.0"
    with loading(wheel, system) as pid:
        check = checks(pid)["UCX_TWO_COPIES"]
    assert check.state == "warning"
    assert f"pid {pid} has loaded UCX 2 times: {system}, {wheel}" in check.found


def test_ucx_without_cuda_beside_a_gpu_is_told(tmp_path: Path) -> None:
    ucx, cuda = tmp_path / "libucp-8ae1f7.so.0.0.0", tmp_path / "libcuda.so.1"
    with loading(ucx, cuda) as pid:
        check = checks(pid)["UCX_NO_CUDA"]
    assert (check.state, str(ucx) in check.found) == ("warning", True)


def test_ucx_once_and_with_cuda_or_without_a_gpu_is_well(tmp_path: Path) -> None:
    ucx = tmp_path / "libucp-8ae1f7.so.0.0.0"
    with loading(ucx, tmp_path / "libcuda.so.1", tmp_path / "ucx/libuct_cuda-77.so.0") as pid:
        assert checks(pid) == {}
    with loading(ucx) as pid:
        assert checks(pid) == {}


def test_of_a_process_that_has_ended_nothing_is_said(tmp_path: Path) -> None:
    with loading(tmp_path / "libucp.so.0") as pid:
        pass
    assert checks(pid) == {}
