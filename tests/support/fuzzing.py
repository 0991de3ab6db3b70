"""Fuzzing: a corpus in a text file, mutations of it from a seed, and a search for inputs that reach new code.

python tests/fuzz/test_NAME.py SECONDS       # adds what it finds to tests/fuzz/corpus/NAME.txt
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.daemons import ROOT

CORPUS = ROOT / "tests" / "fuzz" / "corpus"
A_SEED = 1000
"""Mutated inputs that a test makes of one seed."""
SEEDS = range(max(1, int(os.environ.get("KVD_FUZZ_INPUTS", "3000")) // A_SEED))
"""So many of them that the tests of one file try as many inputs as ``KVD_FUZZ_INPUTS`` says."""
LONGEST = 600
_NUMBERS = (0, 1, 2, 7, 16, 31, 64, 127, 128, 254, 255)

Target = Callable[[bytes], None]


def corpus(name: str) -> list[bytes]:
    """The inputs of a file, one a line in hexadecimal."""
    return [bytes.fromhex(line) for line in _file(name).read_text().split()]


def mutated(inputs: list[bytes], count: int, seed: int, longest: int = LONGEST) -> Iterator[bytes]:
    """So many inputs of ``longest`` bytes at most that resemble these; the same ones for a seed."""
    chance = random.Random(seed)
    for _ in range(count):
        data = bytearray(chance.choice(inputs))
        for _ in range(chance.choice((1, 1, 2, 4, 8))):
            _change(data, chance, inputs)
        yield bytes(data[:longest])


def _change(data: bytearray, chance: random.Random, inputs: list[bytes]) -> None:
    at = chance.randrange(len(data) + 1)
    some = chance.choice((1, 2, 4, 9, 40))
    match chance.randrange(7):
        case 0:
            data[at : at + some] = b""
        case 1:
            data[at:at] = chance.randbytes(some)
        case 2:
            data[at : at + 1] = bytes((chance.choice(_NUMBERS),))
        case 3:
            data[at : at + 1] = bytes((chance.randrange(256),))
        case 4:
            data[at:at] = data[at : at + some]
        case 5:
            other = chance.choice(inputs)
            begin = chance.randrange(len(other) + 1)
            data[at:at] = other[begin : begin + some]
        case 6:
            data[at : at + 8] = chance.choice((0, 255, 256, 1 << 31, 1 << 32, (1 << 64) - 1)).to_bytes(
                8, "big"
            )


def search(name: str, target: Target, package: str, seconds: float, begin: list[bytes]) -> None:
    """Add inputs to the corpus that go from one line of ``package`` to another as none before did."""
    known: set[tuple[int, int, int]] = set()
    kept: list[bytes] = []
    for data in {*begin, *(corpus(name) if _file(name).exists() else ())}:
        _keep(data, target, package, known, kept)
    end = time.monotonic() + seconds
    seed = random.randrange(1 << 32)
    while time.monotonic() < end:
        seed += 1
        for data in mutated(kept, 100, seed):
            _keep(data, target, package, known, kept)
    _file(name).parent.mkdir(exist_ok=True)
    _file(name).write_text("".join(f"{data.hex()}\n" for data in sorted(kept)))
    sys.stdout.write(f"{len(kept)} inputs, {len(known)} ways from line to line\n")


def _keep(
    data: bytes, target: Target, package: str, known: set[tuple[int, int, int]], kept: list[bytes]
) -> None:
    taken: set[tuple[int, int, int]] = set()

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        if event == "call":
            if not str(frame.f_globals.get("__name__")).startswith(package):
                return None
            last = 0
            code = id(frame.f_code)

            def lines(inner: FrameType, what: str, _more: object) -> Any:
                nonlocal last
                if what == "line":
                    taken.add((code, last, inner.f_lineno))
                    last = inner.f_lineno
                return lines

            return lines
        return None

    sys.settrace(trace)
    try:
        target(data)
    finally:
        sys.settrace(None)
    if taken - known:
        known |= taken
        kept.append(data)


def _file(name: str) -> Path:
    return CORPUS / f"{name}.txt"
