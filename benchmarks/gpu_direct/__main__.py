"""Direct reads between GPUs, without vLLM: every byte checked, and how fast, at what cost, and what ends them.

    PYTHONPATH=daemon:. python3 -m benchmarks.gpu_direct --json direct.json

Owner and reader are two processes, on two GPUs where there are two, else on one. Needs torch, Triton, numpy and
msgspec; takes under 100 s. A part that fails stands in the result as an error, and the others still run.
"""
# ruff: noqa: T201 - a script that prints

from __future__ import annotations

import argparse
import json
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_direct.ends import ends, from_another, from_itself
from benchmarks.gpu_direct.owner import owner, tensors
from benchmarks.gpu_direct.parts import beside, busy_python, check_bytes, costs, plain_copy, sweep
from benchmarks.gpu_direct.reader import Reader

SECONDS = 95


def part(reader: Reader, name: str, work: Callable[[], Any]) -> None:
    """Run one part, note what it gave or why it did not, and print it."""
    began = time.perf_counter()
    try:
        found = work()
    except Exception as error:  # noqa: BLE001 - the others shall run
        found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]}
    reader.seen[name] = found
    print(f"# {name} ({time.perf_counter() - began:.1f} s)")
    print(json.dumps(found, indent=1), flush=True)


def main() -> None:
    """Run all parts, most wanted first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(SECONDS)
    several = torch.cuda.device_count() > 1
    theirs, mine = "cuda:0", "cuda:1" if several else "cuda:0"
    torch.cuda.set_device(mine)
    seen = {"gpu": torch.cuda.get_device_name(), "gpus": 2 if several else 1, "torch": torch.__version__}
    reader = Reader(mine, tensors(mine), seen)
    try:
        with owner(theirs) as peer:
            part(reader, "costs", lambda: costs(reader, peer))
            part(reader, "bytes", lambda: check_bytes(reader, peer))
            part(reader, "plain copy", lambda: plain_copy(reader, peer))
            part(reader, "by thread blocks", lambda: sweep(reader, peer))
            part(reader, "compute beside it", lambda: beside(reader, peer))
            part(reader, "beside python", lambda: busy_python(reader, peer))
        part(reader, "ends", lambda: ends(reader, theirs))
        part(reader, "same process", lambda: from_itself(reader))
        if several:
            part(reader, "two processes on one gpu", lambda: from_another(reader, mine))
        expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        part(reader, "expandable segments", lambda: from_another(reader, theirs, **expandable))
        if several:
            only = {"CUDA_VISIBLE_DEVICES": "1"}
            part(reader, "owner that sees one gpu", lambda: from_another(reader, "cuda:0", **only))
    finally:
        if given.json:
            given.json.parent.mkdir(parents=True, exist_ok=True)
            given.json.write_text(json.dumps(seen, indent=1))


def _out_of_time(*_: object) -> None:
    raise SystemExit(f"out of time after {SECONDS} s")


if __name__ == "__main__":
    main()
