"""What it costs an engine at start to find out which weights it runs, against doing without.

    python benchmarks/weights.py --folder /tmp/weights --rounds 5
    python benchmarks/weights.py --model /models/llama        # a checkpoint that is there

Without --model it writes three checkpoints of 400 GB each: headers are real, the tensors' bytes are holes of sparse
files, which take no room on the disk and cost a read the same as any page in the page cache. The first round reads the
pages, the others find them. --real BYTES writes one more, of real bytes, and reads it with a cold cache as well (the
kernel is asked to drop its pages).
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

from kvd.weights.checkpoint import weights_fingerprint

SHAPES = {"few": (160, 1_120), "experts": (160, 14_400), "many experts": (160, 91_040)}
"""Files and tensors: a dense model of 400 billion numbers, and mixtures of experts with a tensor for each."""


def write(folder: Path, files: int, tensors: int, total: int, *, real: bool = False) -> None:
    """A checkpoint of ``tensors`` tensors of 8-bit numbers, ``total`` bytes in all."""
    if (folder / "complete").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    size = total // tensors // 2048 * 2048
    for number in range(files):
        header = {
            f"model.layers.{number}.mlp.experts.{one}.down_proj.weight": {
                "dtype": "F8_E4M3", "shape": [size // 2048, 2048], "data_offsets": [one * size, (one + 1) * size],
            }
            for one in range(tensors // files)
        }  # fmt: skip
        text = json.dumps(header).encode()
        with (folder / f"model-{number:05}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            if real:
                for _ in range(tensors // files):
                    file.write(os.urandom(size))
            else:
                file.truncate(8 + len(text) + tensors // files * size)
    (folder / "complete").touch()


def forget(folder: Path) -> None:
    """Ask the kernel to drop the files' pages."""
    os.sync()
    for path in folder.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def measure(name: str, folder: Path, rounds: int, *, cold: bool = False) -> None:
    """Print the times of ``rounds`` fingerprints, the first apart."""
    times, busy = [], []
    for _ in range(rounds):
        if cold:
            forget(folder)
        began, worked = time.perf_counter(), time.process_time()
        found = weights_fingerprint(folder)
        times.append(time.perf_counter() - began)
        busy.append(time.process_time() - worked)
    files = len([*folder.glob("*.safetensors")])
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    rest = statistics.median(times[1:] or times)
    sys.stdout.write(
        f"{name:28} {files:4} files {size / 1e9:7.1f} GB  first {times[0]:6.3f} s  then {rest:6.3f} s"
        f" ({statistics.median(busy[1:] or busy):.3f} of processor)"
        f"  {found.value or found.source}\n"
    )
    sys.stdout.flush()


def main() -> None:
    """Write what is missing, and measure."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--folder", type=Path, default=Path("/tmp/kvctl-weights"))  # noqa: S108
    options.add_argument("--model", type=Path)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--bytes", type=int, default=400 * 10**9)
    options.add_argument("--real", type=int, default=0, metavar="BYTES")
    given = options.parse_args()
    if given.model is not None:
        measure(given.model.name, given.model, given.rounds)
        return
    for name, (files, tensors) in SHAPES.items():
        folder = given.folder / name.replace(" ", "-")
        write(folder, files, tensors, given.bytes)
        measure(f"{name}, {tensors} tensors", folder, given.rounds)
    if given.real:
        folder = given.folder / "real"
        write(folder, 8, 1_120, given.real, real=True)
        measure("real, 1120 tensors", folder, given.rounds)
        measure("real, cold", folder, given.rounds, cold=True)


if __name__ == "__main__":
    main()
