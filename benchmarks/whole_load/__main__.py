"""Whole loads between two processes, without vLLM, against a plain copy of the same bytes in the same run.

    PYTHONPATH=daemon:. python3 -m benchmarks.whole_load --out load.jsonl
    PYTHONPATH=daemon:. python3 -m benchmarks.whole_load --out load.jsonl --before FOLDER/daemon --only direct,staged
    PYTHONPATH=daemon:. python3 -m benchmarks.whole_load --out load.jsonl --device cpu --scale 64
    PYTHONPATH=daemon:. python3 -m benchmarks.whole_load.table load.jsonl      # into docs/gpu.md

Owner and reader are two processes, on two GPUs where there are two, else on one. What is timed is the code of a
decoding worker: its thread, plan and backend. Every shape is also loaded onto cleared memory, and every byte compared.
``--before`` has an older version of the packages measured in turns with this one. It needs torch, Triton, numpy and
msgspec, and for `staged` NIXL. A part that fails stands in the result as an error, and the others still run.
"""
# ruff: noqa: T201 - a script that prints

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.whole_load.cache import TOKEN_BYTES, Memory, some_blocks
from benchmarks.whole_load.child import Child
from benchmarks.whole_load.table import table

MIB = 1 << 20
SIZES = (32, 256, 1024)
"""MiB of a load."""
POOL = 2112
"""MiB of a worker's memory: blocks for the largest load twice, and some more."""
BOTH: tuple[Memory, ...] = ("block", "layer")
CTAS = (16, 32, 64, 132, 264)


@dataclass(frozen=True)
class Shape:
    """What is loaded: by which backend, from memory of which kind, in blocks of so many tokens.

    Each of ``sizes`` is loaded ``times`` in a row, also while the interpreter is ``busy``; ``plain`` copies are made
    beside it, and of a backend that ``stages`` the peer puts out first what is read.
    """

    kind: str
    memory: Memory
    block: int
    options: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = SIZES
    busy: tuple[bool, ...] = (False,)
    plain: bool = False
    stages: bool = False
    times: int = 8

    @property
    def name(self) -> str:
        """Of the way that it opens."""
        return f"{self.kind}-{self.memory}-{self.block}"


class Run:
    """Both processes of each version of the code, and the file that results go to."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.rounds: int = given.rounds
        self.scale: int = given.scale
        self.cpu = given.device == "cpu"
        several = not self.cpu and torch.cuda.device_count() > 1
        theirs, mine = ("cpu", "cpu") if self.cpu else ("cuda:0", "cuda:1" if several else "cuda:0")
        self.where = "CPU" if self.cpu else f"{torch.cuda.get_device_name()}, {2 if several else 1}"
        self.until = time.monotonic() + given.seconds
        self._out = given.out.open("w")
        self.codes: dict[str, tuple[Child, Child]] = {}
        paths = {"before": given.before, "now": Path(__file__).resolve().parents[2] / "daemon"}
        size = str(POOL * MIB // self.scale)
        for code, path in paths.items():
            if path is not None:
                owner, reader = (
                    Child(f"benchmarks.whole_load.{role}", path, folder, device, size)
                    for role, device in (("owner", theirs), ("reader", mine))
                )
                self.codes[code] = (owner, reader)

    def note(self, **found: Any) -> None:
        """Write a result at once."""
        self._out.write(json.dumps(found) + "\n")
        self._out.flush()

    def end(self) -> None:
        """End all processes."""
        for children in self.codes.values():
            for child in children:
                child.end()

    @contextmanager
    def opened(self, shape: Shape) -> Iterator[tuple[list[str], int]]:
        """A backend in each process: the versions in which there is one, and how many blocks there are."""
        name, blocks, codes = shape.name, 0, []
        how = {"name": name, "kind": shape.kind, "memory": shape.memory, "block": shape.block}
        for code, (owner, reader) in self.codes.items():
            try:
                mine = {**how, "options": shape.options}
                geometry, metadata, blocks = owner.ask("open", 90, **mine)
                took = reader.ask("open", 90, **mine, geometry=geometry, metadata=metadata)
            except RuntimeError as error:
                self.note(part="open", code=code, **mine, error=str(error))
                print(f"# {code} {name}: {str(error).strip().splitlines()[-1]}", flush=True)
            else:
                self.note(part="open", code=code, **mine, **took)
                codes.append(code)
        try:
            yield codes, blocks
        finally:
            for code in self.codes:
                for child in reversed(self.codes[code]):
                    try:
                        child.ask("close", name=name)
                    except RuntimeError as error:
                        self.note(part="close", code=code, name=name, error=str(error))

    def loads(self, shape: Shape) -> None:
        """Load each size with each version in turns; before that compare all bytes once."""
        name, block = shape.name, shape.block
        more = {"kind": shape.kind, "memory": shape.memory, "block": block, "options": shape.options}
        with self.opened(shape) as (codes, blocks):
            for size in shape.sizes:
                count = size * MIB // self.scale // (TOKEN_BYTES * block)
                if not count:
                    continue
                about = {**more, "size": size / self.scale, "where": self.where}
                chosen = {"mine": some_blocks(blocks, count, 1), "theirs": some_blocks(blocks, count, 2)}
                put_out = {"name": name, "ids": chosen["theirs"], "tokens": count * block}
                for code in list(codes):
                    owner, reader = self.codes[code]
                    staged = owner.ask("stage", **put_out) if shape.stages else 0.0
                    wrong = reader.ask("check", name=name, **chosen)
                    self.note(part="check", code=code, wrong=wrong, staged_s=staged, **about)
                    if wrong:
                        print(f"# {code} {name} {size} MiB: {wrong} WRONG WORDS", flush=True)
                        codes.remove(code)
                for code in codes * self.rounds:
                    owner, reader = self.codes[code]
                    for busy in shape.busy:
                        staged = owner.ask("stage", **put_out) if shape.stages else 0.0
                        runs = reader.ask("load", name=name, **chosen, times=shape.times, busy=busy)
                        self.note(part="load", code=code, busy=busy, staged_s=staged, runs=runs, **about)
                    if shape.plain:
                        nbytes = count * TOKEN_BYTES * block
                        runs = reader.ask("plain", name=name, size=nbytes, times=shape.times)
                        self.note(part="plain", code=code, runs=runs, **about)


def direct(run: Run) -> None:
    """By block and by layer, with the interpreter idle and busy."""
    for memory in BOTH:
        run.loads(Shape("direct", memory, 16, busy=(False, True), plain=True))


def ctas(run: Run) -> None:
    """1 GiB by numbers of thread blocks."""
    for number in CTAS:
        run.loads(Shape("direct", "block", 16, {"ctas": number}, sizes=SIZES[1:], times=5))


def staged(run: Run) -> None:
    """Through mirrors, with and without mapping the peer's, and plain copies to pinned memory and back."""
    for size in SIZES:
        for code, (_, reader) in run.codes.items():
            found = reader.ask("through_host", size=size * MIB // run.scale, times=3)
            run.note(part="through_host", code=code, size=size / run.scale, runs=found, where=run.where)
    run.loads(Shape("staged", "layer", 16, stages=True, times=2))
    run.loads(Shape("staged", "block", 16, sizes=SIZES[2:], stages=True, times=2))
    run.loads(Shape("staged", "layer", 16, {"memfd": False}, sizes=SIZES[2:], stages=True, times=2))


def mooncake(run: Run) -> None:
    """The shortest loads, by block and by layer."""
    for memory in BOTH:
        for block in (16, 128):
            run.loads(Shape("mooncake", memory, block, sizes=SIZES[:2]))


def nixl(run: Run) -> None:
    """The shortest loads by block."""
    run.loads(Shape("nixl", "block", 16, sizes=SIZES[:2]))


PARTS: dict[str, Callable[[Run], None]] = {
    "direct": direct, "staged": staged, "ctas": ctas, "mooncake": mooncake, "nixl": nixl
}  # fmt: skip


def main() -> None:
    """Run the parts that are wanted, each for itself."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="results, a JSON object a line")
    parser.add_argument("--before", type=Path, help="the daemon folder of an older version")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, in this order")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--scale", type=int, default=1, help="divides all sizes")
    parser.add_argument("--seconds", type=float, default=165.0, help="no part begins after so many")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(given, Path(folder))
        try:
            for name in given.only.split(","):
                _part(run, name)
        finally:
            run.end()
    print(table(given.out.read_text().splitlines()))


def _part(run: Run, name: str) -> None:
    began = time.monotonic()
    if began > run.until:
        print(f"# {name}: no time left", flush=True)
        return
    try:
        PARTS[name](run)
    except Exception as error:  # noqa: BLE001 - the others shall run
        run.note(part=name, error=str(error))
        print(f"# {name}: {str(error).strip()[-600:]}", flush=True)
    print(f"# {name} took {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
