"""What `auto` tells its peers: the metadata of the backends that it stands for."""

from __future__ import annotations

import msgspec

from kvd.backends.envelope import Envelope, decoded, pack, unpack

NAME = "auto"
VERSION = "1"


class Both(msgspec.Struct, frozen=True):
    """Metadata of the direct backend and of the transfer engine's, each as it is exported.

    Either may be missing, with the reason in its place: ``no_direct``, ``no_engine``. ``engine`` names the transfer
    engine, installed or not.
    """

    engine: str
    direct_metadata: bytes = b""
    engine_metadata: bytes = b""
    no_direct: str = ""
    no_engine: str = ""


def write_both(agent: str, both: Both) -> bytes:
    """The bytes to hand to peers."""
    return pack(Envelope(NAME, VERSION, agent, (), msgspec.msgpack.encode(both)))


def read_both(metadata: bytes) -> Both:
    """What `write_both` wrote.

    Raises:
        PeerMetadataError: of another backend or version, or damaged.
    """
    blob = unpack(metadata, backend=NAME, version=VERSION).blob
    return decoded(blob, Both, backend=NAME, decode=msgspec.msgpack.decode)
