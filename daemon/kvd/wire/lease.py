"""Leases: how long a prefiller keeps a finished request's blocks for a decoder.

The prefiller's scheduler owns the lease and frees the blocks; kvd carries claims, renewals and releases to it
and ends it when it runs out. Times on the wire are durations, never clocks of another host.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvd.wire.identity import Endpoint
from kvd.wire.registration import OpenLease

LeaseEnd = Literal["released", "expired", "aborted"]


class LeaseOpened(msgspec.Struct, tag="lease_opened", frozen=True, kw_only=True):
    """The prefiller's scheduler opened leases. Answered by `Ok`."""

    engine_id: str
    leases: tuple[OpenLease, ...]


class LeaseKey(msgspec.Struct, frozen=True, kw_only=True):
    """Names a lease from the decoder's side: the prefilling engine, its kvd, its request."""

    engine_id: str
    request_id: str
    endpoint: Endpoint = Endpoint()


class LeaseClaim(msgspec.Struct, tag="lease_claim", frozen=True, kw_only=True):
    """A decoder means to read (or still means to: a claim renews). Answered by `LeaseClaimed`."""

    key: LeaseKey
    extend_seconds: float = 0.0


class LeaseClaimed(msgspec.Struct, tag="lease_claimed", frozen=True, kw_only=True):
    """``seconds`` for which the blocks are certain to be kept, counted from when the claim was *sent*; 0.

    No lease.
    """

    request_id: str
    seconds: float
    reason: str = ""


class LeaseRelease(msgspec.Struct, tag="lease_release", frozen=True, kw_only=True):
    """The decoder needs the blocks no longer; ``result`` says whether it got them. Answered by `Ok`.

    Kept by the sender and sent again until answered. Releasing an unknown lease is no error.
    """

    key: LeaseKey
    result: Literal["done", "miss", "aborted"] = "done"


class LeaseExtend(msgspec.Struct, tag="lease_extend", frozen=True, kw_only=True):
    """kvd to the owning scheduler: keep it for ``seconds`` more.

    Answered by `LeaseClaimed` with what remains.
    """

    request_id: str
    seconds: float


class LeaseEnded(msgspec.Struct, tag="lease_ended", frozen=True, kw_only=True):
    """kvd to the owning scheduler: free the blocks."""

    request_id: str
    end: LeaseEnd


class LeaseClosed(msgspec.Struct, tag="lease_closed", frozen=True, kw_only=True):
    """The owning scheduler freed the blocks by itself (its own clock ran out, the request was aborted).

    Answered by `Ok`.
    """

    engine_id: str
    request_id: str
    end: LeaseEnd
