"""One lease: who keeps the blocks, until when, and who reads them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec

from kvd.service.engines.ended_leases import EndedLease
from kvd.service.engines.local_engine import Client
from kvd.wire.lease import LeaseClaimed, LeaseEnd
from kvd.wire.registration import OpenLease

MAX_READERS = 4096
"""Most readers that a lease may ever have."""
MAX_READERS_OF_ONE = 1024
"""Most of them that one claimant may have: a request with `n` answers has one for each of them."""
ReaderName = tuple[str, str]
"""The name of a reader's claimant, and its id."""
INHERITED: ReaderName = ("", "")
"""Stands for the readers that another kvd may have let in. No reader has this id."""


@dataclass(slots=True)
class LeaseEntry:
    """Blocks that ``owner``, a scheduler, keeps until ``expires``; it was ``opened`` (both are time.monotonic()).

    Until ``unasked`` it keeps them whether a reader asks for that or not. ``opening`` as in `OpenLease`.
    ``readers`` are those that claimed it and have not released it, with the time until which they may read. ``gone``
    are those that released it: what they sent before may arrive after. ``held`` counts both by their claimants.
    ``dropped``: its owner no longer lists it, so it is open for nobody, and is taken out soon. ``closed``:
    why no further reader is let in. ``ending``: an operator ended it, so that its readers get no further time either.
    ``traceparent`` as in `OpenLease`; it was ``claimed`` first at that time.monotonic(), 0 before that.
    """

    owner: Client
    request_id: str
    blocks: int
    opened: float
    unasked: float
    expires: float
    opening: int
    readers: dict[ReaderName, float] = field(default_factory=dict)
    gone: set[ReaderName] = field(default_factory=set)
    held: dict[str, int] = field(default_factory=dict)
    dropped: bool = False
    closed: str = ""
    ending: bool = False
    traceparent: str = ""
    claimed: float = 0.0

    def ended(self, end: LeaseEnd) -> EndedLease:
        """What is remembered of it, which has ended just now."""
        return EndedLease(self.owner.incarnation, self.opening, self.owner.uid, end, time.monotonic())

    def promised(self) -> float:
        """Until when somebody may read at most; 0 where it has no reader."""
        return max(self.readers.values(), default=0.0)

    def until(self, *, stranger: bool) -> float:
        """Until when a reader may read; a ``stranger`` gains nothing from what others asked for."""
        return min(self.unasked, self.expires) if stranger else self.expires

    def refusal(self, reader: ReaderName) -> LeaseClaimed | None:
        """The answer to a reader that is not let in; None for one that is, or that reads already."""
        name = self.owner.engine.engine_id, self.request_id
        if reader in self.gone:
            return claim_of_nothing(name, f"reader {reader[1]} has released lease {name[1]!r}", ended=True)
        if reader in self.readers:
            return None
        if self.closed and INHERITED not in self.readers:  # else it may be one that an earlier kvd let in
            return claim_of_nothing(name, self.closed, ended=True)
        if full := self.full(reader[0]):
            return claim_of_nothing(name, f"lease {name[1]!r} {full}: no more are let in")
        return None

    def full(self, claimant: str) -> str:
        """Why that claimant can have no further reader here; empty where it can."""
        if len(self.readers) + len(self.gone) >= MAX_READERS:
            return f"had {MAX_READERS} readers"
        if self.held.get(claimant, 0) >= MAX_READERS_OF_ONE:
            return f"had {MAX_READERS_OF_ONE} readers of one host or client"
        return ""


class PresentedLease(msgspec.Struct, frozen=True, gc=False):
    """A lease that its owner listed when it registered, ``at`` time.monotonic()."""

    owner: Client
    lease: OpenLease
    at: float


def claim_of_nothing(name: tuple[str, str], reason: str, *, ended: bool = False) -> LeaseClaimed:
    """The answer to a claim under which nothing is kept; ``ended``: nor will be."""
    return LeaseClaimed(request_id=name[1], seconds=0.0, reason=reason, ended=ended)
