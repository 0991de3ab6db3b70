"""Starts one of the two processes of a benchmark, and the words in which it is told who it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvctl.bench.transport import ucx_environment
from kvctl.processes.worker_process import WorkerProcess, start_worker
from kvd.backends.registry import ADAPTERS

START_SECONDS = 90.0
END_SECONDS = 10.0


def start(name: str, backend: str, folder: Path, environment: Mapping[str, str]) -> WorkerProcess:
    """The process ``name``, not yet told anything; its log and UCX's are in ``folder``."""
    path = folder / f"{backend}-{name}.log"
    own = ucx_environment(ucx_log(name, backend, folder)) | dict(environment)
    return start_worker(f"the {name} with {backend}", "kvctl.bench.worker", path, own)


def ucx_log(name: str, backend: str, folder: Path) -> Path:
    """Where UCX writes what it chose."""
    return folder / f"{backend}-{name}-ucx.log"


def introduction(
    name: str,
    backend: str,
    options: Mapping[str, Any],
    workers: Mapping[str, Any],
    device: int | None,
) -> dict[str, Any]:
    """What a process is told first: ``workers`` are the geometries of its memory, by position in their engine."""
    return {
        "name": name,
        "reads": name == "reader",
        "backend": backend,
        "device": device,
        "options": dict(options),
        "workers": dict(workers),
    }


def options_at(backend: str, host: str) -> dict[str, Any]:
    """The adapter's options where the other side is on another host, and this one is reached at ``host``."""
    option = ADAPTERS[backend].host_option
    return {option: host} if option else {}
