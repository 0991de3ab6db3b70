"""Files of weights in formats that are not read here (``.bin``, ``.pt``, GGUF): names, sizes, samples of bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from kvd.weights.sampling import SAMPLES, fetch, opened, places, read_at

MOST_SAMPLES = 4096
"""Samples of one file."""


def digest_files(files: Sequence[Path], budget: int = SAMPLES) -> bytes:
    """A digest of ``files`` by name. Raises `WeightsUnreadable` naming the file that cannot be read."""
    count = max(1, min(MOST_SAMPLES, budget // max(1, len(files))))
    whole = hashlib.blake2b(b"files", digest_size=32)
    for path in sorted(files, key=lambda each: each.name):
        with opened(path) as file:
            size = os.fstat(file).st_size
            told = f"{path.name}\0{size}\0".encode("utf-8", "surrogateescape")
            hashed = hashlib.blake2b(told, digest_size=32)
            spans = places(told, size, count)
            fetch(file, spans)
            for offset, length in spans:
                hashed.update(read_at(file, offset, length))
            whole.update(hashed.digest())
    return whole.digest()
