"""What a Mooncake engine tells its peers of itself, inside our envelope."""

from __future__ import annotations

import msgspec

from kvd.backends.envelope import decoded
from kvd.backends.errors import PeerMetadataError
from kvd.backends.mooncake.library import NAME


class EngineTarget(msgspec.Struct, frozen=True):
    """An engine as peers see it: its session ("host:port"), its protocol, its mark in hex and where that stands."""

    session: str
    protocol: str
    mark: str
    mark_address: int


def parse_target(blob: bytes, protocol: str) -> EngineTarget:
    """Read the blob of an envelope, which is JSON.

    Raises:
        PeerMetadataError: it cannot be read, or the peer does not speak ``protocol``.
    """
    target = decoded(blob, EngineTarget, backend=NAME)
    if target.protocol != protocol:
        raise PeerMetadataError(
            f"protocol is {target.protocol} at the peer and {protocol} here",
            backend=NAME,
            hint="set the option protocol to the same on both engines",
        )
    return target
