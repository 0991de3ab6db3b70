"""What a set of safetensors files holds: names, types and shapes of all tensors, and samples of their bytes.

The format, as its authors publish it, has three parts. The first 8 bytes are the header's length in little-endian. The
header is a JSON object of ``name: {dtype, shape, data_offsets}``, with ``__metadata__`` beside them. The rest are the
tensors' bytes, which the offsets count.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kvd.weights.errors import WeightsUnreadable
from kvd.weights.sampling import SAMPLES, fetch, opened, places, read_at, samples_each

LONGEST_HEADER = 100_000_000
"""Bytes; the reference implementation takes no longer ones."""
LONGEST_HEADERS = 512 << 20
"""Bytes of all headers of a checkpoint."""
MOST_FILES = 4096


class _Entry(msgspec.Struct, frozen=True, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_Tensor = msgspec.json.Decoder(_Entry)


def digest_tensors(files: Sequence[Path], budget: int = SAMPLES) -> bytes:
    """A digest of all tensors in ``files``: the same however they are spread over files, whatever these are called.

    Reads headers and about ``budget`` samples. Raises `WeightsUnreadable` naming the file that is not as it should be.
    """
    if len(files) > MOST_FILES:
        raise WeightsUnreadable(f"{len(files)} files, at most {MOST_FILES} are read")
    headers, left = [], LONGEST_HEADERS
    for path in files:
        with opened(path) as file:
            begin, tensors = _header(file, left)
        left -= begin
        headers.append((path, begin, tensors))
    count = samples_each(sum(len(tensors) for _, _, tensors in headers), budget)
    found: list[tuple[str, bytes]] = []
    for path, begin, tensors in headers:
        with opened(path) as file:
            found += _sampled(file, begin, tensors, count)
    found.sort()
    whole = hashlib.blake2b(b"tensors", digest_size=32)
    for _, digest in found:
        whole.update(digest)
    return whole.digest()


def _header(file: int, left: int) -> tuple[int, list[tuple[str, _Entry]]]:
    """Where the tensors' bytes begin, and the tensors in the order of their bytes."""
    size = os.fstat(file).st_size
    if size < 8:
        raise WeightsUnreadable(f"{size} bytes are no safetensors file")
    length = int.from_bytes(read_at(file, 0, 8), "little")
    if length > min(LONGEST_HEADER, left) or length > size - 8:
        raise WeightsUnreadable(f"its header is to have {length} bytes, the file has {size}")
    begin, room = 8 + length, size - 8 - length
    try:
        raw = _HEADER.decode(read_at(file, 8, length))
        raw.pop("__metadata__", None)
        tensors = [(name, _Tensor.decode(text)) for name, text in raw.items()]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsUnreadable(f"its header is not one: {error}") from None
    for name, entry in tensors:
        first, end = entry.data_offsets
        if not 0 <= first <= end <= room:
            raise WeightsUnreadable(f"{name!r} is at bytes {first} to {end} of {room}")
    tensors.sort(key=lambda tensor: tensor[1].data_offsets)
    return begin, tensors


def _sampled(
    file: int, begin: int, tensors: Sequence[tuple[str, _Entry]], count: int
) -> Iterator[tuple[str, bytes]]:
    """Name and digest of each tensor, whose bytes are counted from ``begin``."""
    plan = []
    for name, entry in tensors:
        first, end = entry.data_offsets
        told = f"{name}\0{entry.dtype}\0{entry.shape}\0".encode("utf-8", "surrogatepass")
        plan.append((name, told, begin + first, places(told, end - first, count)))
    fetch(file, [(start + offset, length) for _, _, start, spans in plan for offset, length in spans])
    for name, told, start, spans in plan:
        sampled = [read_at(file, start + offset, length) for offset, length in spans]
        yield name, hashlib.blake2b(told + b"".join(sampled), digest_size=32).digest()
