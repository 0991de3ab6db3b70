"""What the processes of workers have loaded: UCX once, and with CUDA where they use a GPU."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path, PurePath

from kvctl.doctor.checks import checked
from kvctl.views.doctor import Check

_UCX = re.compile(r"libucp(-[0-9a-f]+)?\.so(\.\d+)*")
_UCX_CUDA = re.compile(r"libuct_cuda(-[0-9a-f]+)?\.so(\.\d+)*")
_CUDA = re.compile(r"libcuda\.so(\.\d+)*")
"""Names of libraries; those that come in a wheel have a digest in theirs."""

_host = partial(checked, "host")


def loaded_checks(workers: Sequence[int], root: Path = Path("/")) -> Iterator[Check]:
    """The checks. Of a worker whose memory map this user may not read nothing is said."""
    for pid in workers:
        mapped = _mapped(root / "proc" / str(pid) / "maps")
        ucx = sorted(path for path in mapped if _UCX.fullmatch(path.name))
        if len(ucx) > 1:
            yield _host(
                "warning", "UCX_TWO_COPIES",
                f"the worker with pid {pid} has loaded UCX {len(ucx)} times: {', '.join(map(str, ucx))}",
                "each has its own state, and a transfer may end with NIXL_ERR_BACKEND: keep the one of NIXL's wheel,"
                " and take the others out of LD_LIBRARY_PATH and of what the engine imports",
            )  # fmt: skip
        uses_gpu = any(_CUDA.fullmatch(path.name) for path in mapped)
        if ucx and uses_gpu and not any(_UCX_CUDA.fullmatch(path.name) for path in mapped):
            yield _host(
                "warning", "UCX_NO_CUDA",
                f"the worker with pid {pid} uses a GPU, and the UCX that it has loaded does not know CUDA: {ucx[0]}",
                "KV goes through the host's memory, or not at all: install nixl-cu12 or nixl-cu13 as the engine's CUDA,"
                " and let UCX_MODULES and UCX_TLS not leave cuda out",
            )  # fmt: skip


def _mapped(maps: Path) -> set[PurePath]:
    """The files that a process has mapped."""
    with contextlib.suppress(OSError):  # it ended, or is another user's
        lines = maps.read_text(errors="replace").splitlines()
        return {PurePath(parts[5]) for line in lines if len(parts := line.split(maxsplit=5)) == 6}
    return set()
