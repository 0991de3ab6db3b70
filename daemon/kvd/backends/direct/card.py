"""What a direct backend tells its readers: the process that it is, and how its memory is reached."""

from __future__ import annotations

import msgspec

from kvd.backends.direct.memfd import Backing
from kvd.backends.direct.process import NAME, Process
from kvd.backends.envelope import Envelope, decoded, unpack
from kvd.backends.errors import PeerMetadataError
from kvd.backends.regions import joined

VERSION = "2"
"""Of the card that backends hand out. 2: memory may be a device's."""


class SharedStretch(msgspec.Struct, frozen=True):
    """A stretch of an owner's device memory: by ``handle``, or by ``parts``, (file descriptor, bytes) side by side."""

    address: int
    length: int
    handle: bytes = b""
    parts: tuple[tuple[int, int], ...] = ()


class CudaCard(msgspec.Struct, frozen=True):
    """What a backend with device memory tells its readers. IPC handles mean nothing in another IPC namespace."""

    device: str
    ipc_namespace: int
    memory: tuple[SharedStretch, ...]


class Card(msgspec.Struct, frozen=True):
    """What a backend tells its readers, beside its regions.

    ``secret`` stands at ``cookie`` in its memory and at the start of the memfd ``cookie_memory``. ``memory`` has the
    memfd of each joined region, or is empty where one has none. ``cuda`` is there where the memory is a device's.
    ``dumpable`` and ``allows``: as in `kvd.backends.direct.permission.refusal`.
    """

    process: Process
    cookie: int
    secret: bytes
    cookie_memory: Backing
    memory: tuple[Backing, ...]
    dumpable: bool
    allows: bool
    cuda: CudaCard | None = None


def read_card(metadata: bytes) -> tuple[Envelope, Card]:
    """A peer's envelope and the card in it.

    Raises:
        PeerMetadataError: not of this backend, or of another version of it, or no card.
    """
    envelope = unpack(metadata, backend=NAME, version=VERSION)
    card = decoded(envelope.blob, Card, backend=NAME)
    if card.memory and len(card.memory) != len(joined(envelope.regions)):
        raise PeerMetadataError(
            f"the peer's card has {len(card.memory)} memfds for {len(joined(envelope.regions))} regions",
            backend=NAME,
        )
    return envelope, card
