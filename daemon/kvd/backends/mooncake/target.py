"""What a Mooncake engine tells its peers of itself, inside our envelope."""

from __future__ import annotations

import json
from dataclasses import dataclass

from kvd.backends.errors import PeerMetadataError
from kvd.backends.mooncake.library import NAME


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """An engine as peers see it: its session ("host:port"), its protocol, and its mark with the address of that."""

    session: str
    protocol: str
    mark: bytes
    mark_address: int


def pack_target(target: EngineTarget) -> bytes:
    """The blob of an envelope."""
    return json.dumps(
        {
            "session": target.session,
            "protocol": target.protocol,
            "mark": target.mark.hex(),
            "mark_address": target.mark_address,
        }
    ).encode()


def parse_target(blob: bytes, protocol: str) -> EngineTarget:
    """Read what `pack_target` wrote.

    Raises:
        PeerMetadataError: it cannot be read, or the peer does not speak ``protocol``.
    """
    try:
        found = json.loads(blob)
        target = EngineTarget(
            str(found["session"]),
            str(found["protocol"]),
            bytes.fromhex(found["mark"]),
            int(found["mark_address"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise PeerMetadataError(f"metadata cannot be read: {error!r}", backend=NAME) from error
    if target.protocol != protocol:
        raise PeerMetadataError(
            f"protocol is {target.protocol} at the peer and {protocol} here",
            backend=NAME,
            hint="set the option protocol to the same on both engines",
        )
    return target
