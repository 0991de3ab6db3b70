"""Reading samples of files: at places that follow from a name alone, so that two copies are read at the same ones."""

from __future__ import annotations

import contextlib
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kvd.weights.errors import WeightsUnreadable

SAMPLE = 256
"""Bytes of one sample: 128 numbers of 16 bits."""
WHOLE = 4096
"""Bytes up to which a tensor is read as a whole."""
FEWEST, MOST = 1, 32
"""Samples of one tensor."""
SAMPLES = 1 << 15
"""Samples of one checkpoint, within `FEWEST` and `MOST` of each tensor."""

_MASK = (1 << 64) - 1


def samples_each(parts: int, budget: int = SAMPLES) -> int:
    """Samples of each of ``parts`` tensors or files, so that all of them together are about ``budget``."""
    return max(FEWEST, min(MOST, budget // max(1, parts)))


def places(name: bytes, size: int, count: int) -> list[tuple[int, int]]:
    """(offset, length) of each sample of ``size`` bytes that are called ``name``, in ascending order.

    Each of ``count`` equal parts has one sample at a pseudo-random place, so that a change of two parts in a row is
    seen for certain. What is short is read as a whole.
    """
    if size <= WHOLE or size <= count * SAMPLE:
        return [(0, size)]
    span, state, found = size - SAMPLE, zlib.crc32(name), []
    for part in range(count):
        # Knuth's linear congruential generator; its high bits are the good ones.
        state = (state * 6364136223846793005 + 1442695040888963407) & _MASK
        found.append(((part * span + (state * span >> 64)) // count, SAMPLE))
    return found


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A regular file, open for reading. Errors of it and of its reading become `WeightsUnreadable` with its name."""
    try:
        # Never waits for a pipe's other end.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise WeightsUnreadable("it is no regular file")
            # The kernel is not to read ahead of samples.
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
            yield file
        finally:
            os.close(file)
    except OSError as error:
        raise WeightsUnreadable(f"{path.name}: {error.strerror or error}") from None
    except WeightsUnreadable as error:
        raise WeightsUnreadable(f"{path.name}: {error}") from None


def read_at(file: int, offset: int, length: int) -> bytes:
    """Exactly ``length`` bytes at ``offset``. Raises `WeightsUnreadable` where the file is shorter by now."""
    data = os.pread(file, length, offset)
    while len(data) < length:
        more = os.pread(file, length - len(data), offset + len(data))
        if not more:
            raise WeightsUnreadable(f"it ends before byte {offset + length}, which was there")
        data += more
    return data


def fetch(file: int, spans: Sequence[tuple[int, int]]) -> None:
    """Have the kernel begin to read (offset, length) ``spans`` all at once, unless they are in its cache already.

    One after the other they take five times as long from a disk. Asking for them costs as much as reading them from the
    cache, so only a few are looked at there.
    """
    buffer = bytearray(1)
    try:
        for offset, _ in spans[:: max(1, len(spans) // 4)]:
            os.preadv(file, [buffer], offset, os.RWF_NOWAIT)
    except OSError:  # it is not there, or this file system does not say
        for offset, length in spans:
            os.posix_fadvise(file, offset, length, os.POSIX_FADV_WILLNEED)


def read_json(path: Path, longest: int = 16 << 20) -> dict[str, object]:
    """A file's JSON object. Raises `WeightsUnreadable` where it is none or has more than ``longest`` bytes."""
    with opened(path) as file:
        size = os.fstat(file).st_size
        if size > longest:
            raise WeightsUnreadable(f"{size} bytes, at most {longest} are read")
        try:
            read = msgspec.json.decode(read_at(file, 0, size))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WeightsUnreadable(str(error)) from None
        if not isinstance(read, dict):
            raise WeightsUnreadable(f"its JSON is a {type(read).__name__}, not an object")
        return read
