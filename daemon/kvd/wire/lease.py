"""Leases: how long a prefiller keeps a finished request's blocks for a decoder.

The prefiller's scheduler owns the lease and frees the blocks; kvd carries claims, renewals and releases to it
and ends it when its last reader has gone or when it runs out. Times on the wire are durations, never clocks of another
host.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvd.wire.identity import LeaseKey, ReaderId
from kvd.wire.limits import MOST_LEASES_OPENED, Count, Id, Seconds, Text
from kvd.wire.registration import OpenLease
from kvd.wire.reply import Reply, Request

LeaseEnd = Literal["released", "expired", "aborted"]


class LeaseOpened(Request, tag="lease_opened", frozen=True, kw_only=True):
    """The prefiller's scheduler opened leases. Answered by `Ok`.

    ``held``: it opened them before it registered, which had no room for them. Somebody may read under them already.
    """

    engine_id: Id
    leases: Annotated[tuple[OpenLease, ...], Meta(max_length=MOST_LEASES_OPENED)]
    held: bool = False


class LeaseClaim(Request, tag="lease_claim", frozen=True, kw_only=True):
    """A reader means to read (or still means to: a claim renews). Answered by `LeaseClaimed`.

    A prefill may have several readers: `n` answers of one prompt, a retry, two decoders. With the prefiller's
    ``generation`` its load may be under way: the reader's workers are told at once, by a `LeaseConfirmed`, where the
    lease is kept and the reader's engine was given the prefiller in that generation. The answer says so as well.
    ``alone``: the workers need not be told, for the scheduler has them at hand.
    """

    key: LeaseKey
    reader: ReaderId
    extend_seconds: Seconds = 0.0
    generation: Id = ""
    alone: bool = False


class LeaseClaimed(Reply, tag="lease_claimed", frozen=True, kw_only=True):
    """``seconds`` for which the blocks are certain to be kept, counted from when the claim was *sent*; 0: no lease.

    ``ended``: there was one for certain, and its blocks may be free. Else it may not have been opened here yet.
    ``generation`` is the claim's, from the reader's own kvd, if that gave its engine the prefiller in it.
    """

    request_id: Id
    seconds: Seconds
    reason: Text = ""
    ended: bool = False
    generation: Id = ""


class LeaseConfirmed(Reply, tag="lease_confirmed", frozen=True, kw_only=True):
    """kvd to a reader's workers, unasked: the claim was answered with ``seconds``, counted as those are.

    Who misses it hears of it from its scheduler.
    """

    reader: ReaderId
    seconds: Seconds


class LeaseRelease(Request, tag="lease_release", frozen=True, kw_only=True):
    """A reader needs the blocks no longer; ``result`` says whether it got them. Answered by `Ok`.

    Kept by the sender and sent again until answered. Releasing an unknown lease is no error, nor is releasing twice.
    """

    key: LeaseKey
    reader: ReaderId
    result: Literal["done", "miss", "aborted"] = "done"


class LeaseExtend(Request, tag="lease_extend", frozen=True, kw_only=True):
    """kvd to the owning scheduler: keep it for ``seconds`` more. ``opening`` as in `OpenLease`.

    Answered by `LeaseClaimed` with what remains.
    """

    request_id: Id
    seconds: Seconds
    opening: Count = 0


class LeaseEnded(Reply, tag="lease_ended", frozen=True, kw_only=True):
    """kvd to the owning scheduler: free the blocks. ``opening`` as in `OpenLease`."""

    request_id: Id
    end: LeaseEnd
    opening: Count = 0


class LeaseClosed(Request, tag="lease_closed", frozen=True, kw_only=True):
    """The owning scheduler freed the blocks by itself (its own clock ran out, the request was aborted).

    ``opening`` as in `OpenLease`: a lease of that id that was opened later stays. Answered by `Ok`.
    """

    engine_id: Id
    request_id: Id
    end: LeaseEnd
    opening: Count = 0
