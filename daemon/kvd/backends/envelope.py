"""The envelope around a transfer engine's own metadata: says whose it is before the engine is shown a byte of it.

An engine answers a foreign blob with one word at best. The envelope names the backend, its version, the agent and the
memory behind it. So a refusal can name both values. A lane knows from it on which device each remote address lives,
which descriptors alone don't say.

Layout: 4 bytes magic, 2 bytes envelope version, 4 bytes length of the header (big endian), header (JSON), blob.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from kvd.backends.errors import PeerMetadataError
from kvd.backends.regions import joined
from kvd.geometry.model import Region

MAGIC = b"KVDM"
VERSION = 1
_PREFIX = struct.Struct(">4sHI")
T = TypeVar("T")


class _Header(msgspec.Struct, frozen=True):
    backend: str
    version: str
    agent: str
    regions: list[tuple[int, int, str]]


@dataclass(frozen=True, slots=True)
class Envelope:
    """One worker's exported metadata.

    ``backend`` and ``version`` name the transfer engine and its release, ``agent`` is what the engine calls the worker,
    ``regions`` the registered memory, ``blob`` what the engine itself exported.
    """

    backend: str
    version: str
    agent: str
    regions: tuple[Region, ...]
    blob: bytes


def pack(envelope: Envelope) -> bytes:
    """The bytes to hand to peers."""
    regions = [(r.address, r.length, r.device) for r in joined(envelope.regions)]
    header = msgspec.json.encode(_Header(envelope.backend, envelope.version, envelope.agent, regions))
    return _PREFIX.pack(MAGIC, VERSION, len(header)) + header + envelope.blob


def unpack(metadata: bytes, *, backend: str, version: str = "") -> Envelope:
    """Read what `pack` wrote, and refuse what is not for ``backend``, or not of its ``version`` where one is given.

    Raises:
        PeerMetadataError: not an envelope, cut short, of another envelope version, of another backend or version.
    """
    if len(metadata) < _PREFIX.size or metadata[:4] != MAGIC:
        raise PeerMetadataError(
            f"metadata of {len(metadata)} bytes begins with {metadata[:4]!r}, not with {MAGIC!r}",
            backend=backend,
            hint="the peer is not a kvd worker, or its metadata was altered on the way",
        )
    _, envelopes, size = _PREFIX.unpack_from(metadata)
    if envelopes != VERSION:
        raise PeerMetadataError(
            f"metadata envelope is version {envelopes} at the peer and {VERSION} here",
            backend=backend,
            hint="run the same release of kvd on both hosts",
        )
    body = metadata[_PREFIX.size : _PREFIX.size + size]
    if len(body) < size:
        raise PeerMetadataError(
            f"metadata header should have {size} bytes and has {len(body)}", backend=backend
        )
    header = decoded(body, _Header, backend=backend)
    regions, blob = tuple(Region(*region) for region in header.regions), metadata[_PREFIX.size + size :]
    found = Envelope(header.backend, header.version, header.agent, regions, blob)
    if found.backend != backend:
        raise PeerMetadataError(
            f"metadata is of backend {found.backend!r} at the peer and {backend!r} here",
            backend=backend,
            hint="configure the same backend on both engines",
        )
    if version and found.version != version:
        raise PeerMetadataError(
            f"metadata is of version {found.version} at the peer and {version} here",
            backend=backend,
            hint="run the same release of kvd on both sides",
        )
    return found


def decoded(told: bytes, kind: type[T], *, backend: str, decode: Callable[..., T] = msgspec.json.decode) -> T:
    """What a peer told of itself, as ``kind``; ``decode`` is msgspec's for the format that it is in.

    Raises:
        PeerMetadataError: it is not, in the name of ``backend``.
    """
    try:
        return decode(told, type=kind)
    except ValueError as error:  # of msgspec, or because it is no UTF-8
        raise PeerMetadataError(f"the peer's metadata cannot be read: {error}", backend=backend) from None


def same_minor_release(here: str, there: str, *, backend: str, engine: str) -> None:
    """Refuse metadata of another minor release of an ``engine``: beyond that engines promise nothing.

    Raises:
        PeerMetadataError: naming both.
    """
    if here.split(".")[:2] != there.split(".")[:2]:
        raise PeerMetadataError(
            f"metadata is of {engine} {there} at the peer and this is {engine} {here}",
            backend=backend,
            hint=f"install the same minor release of {engine} on both hosts",
        )
