"""What a worker's layers hold, whatever the way in which they are cut, laid out and paged: a number for each worker.

Two workers of one pipeline stage have the same one, and so have the workers of another engine that serves the same
layers with other sizes. The numbers of an engine's stages add up to that of the whole, however many stages there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from kvd.geometry.model import Group, Page

BITS = 128
"""Of the numbers: sums are taken modulo 2**BITS."""


def content_of(groups: Iterable[Group]) -> int:
    """The number for the layers of these groups, in whatever order; 0 without any.

    Of a layer counts its name, how its blocks relate to tokens, its window, and the name, the type and the full extent
    of each of its fields. Tokens of a block do not: blocks of other sizes are cut and joined.
    """
    total = 0
    pages: dict[tuple[int, str, int | None], bytes] = {}
    for group in groups:
        window = None if group.kind == "mamba" else group.window
        for layer in group.layers:
            key = id(layer.page), group.kind, window
            if key not in pages:
                pages[key] = repr((group.kind, window, _fields(layer.page))).encode()
            digest = hashlib.blake2b(layer.name.encode() + b"\0" + pages[key], digest_size=BITS // 8).digest()
            total += int.from_bytes(digest)
    return total % (1 << BITS)


def added(contents: Iterable[int]) -> int:
    """The number for all stages together; each stage is to be there once."""
    return sum(contents) % (1 << BITS)


def _fields(page: Page) -> list[tuple[str, str, int, tuple[tuple[str, int], ...]]]:
    return sorted(
        (field.name, field.dtype, field.itemsize, tuple(sorted(x for x in field.shape if x[0] != "token")))
        for field in page.fields
    )
