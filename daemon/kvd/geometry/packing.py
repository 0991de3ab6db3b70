"""Documents of geometries on their way from a worker to its kvd: packed with zlib, unpacked within bounds.

The layers of a worker are alike, so 80 of them pack to a fifth. Nothing else knows of this: kvd unpacks the document as
soon as it has come, and keeps, digests and passes on what `kvd.geometry.codec` made, byte for byte.
"""

from __future__ import annotations

import zlib

from kvd.geometry.codec import MAX_DOCUMENT
from kvd.geometry.errors import BadGeometry

WORTH_PACKING = 1024
"""Bytes of a document from which packing it is worth a look."""
MOST_TIMES = 64
"""A packed document may become so many times as large; real ones stay below 20. zlib can reach 1,000, and then a
kilobyte would cost its reader as much as a megabyte."""


def pack(document: bytes) -> bytes:
    """The document, packed."""
    return zlib.compress(document)


def unpack(packed: bytes) -> bytes:
    """What `pack` was given. Raises `BadGeometry` where it is nothing of the kind, or would be too large.

    No more memory is taken than a document may have.
    """
    most = min(MAX_DOCUMENT, MOST_TIMES * len(packed))
    unpacking = zlib.decompressobj()
    try:
        document = unpacking.decompress(packed, most + 1)
    except zlib.error as error:
        raise BadGeometry(f"not a packed geometry: {error}") from None
    if len(document) > most:
        raise BadGeometry(f"{len(packed)} bytes unpack to more than {most}, which is what is taken")
    if not unpacking.eof:
        raise BadGeometry(f"not a packed geometry: it does not end within its {len(packed)} bytes")
    if behind := len(unpacking.unused_data):
        raise BadGeometry(f"not a packed geometry: {behind} of {len(packed)} bytes stand behind its end")
    return document
