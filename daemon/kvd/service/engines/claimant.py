"""Who claims leases, and what kvd knows of them.

A reader belongs to its `Claimant`: to the host whose key the claim came under, or to the local
client that claimed. It is known by both together, so what one claimant claims, renews or releases is never another's
reader, also where it gives the same id. From this follows:

- Only the claimant of a reader renews it or releases it. A release ends no claim of anybody else.
- A release whose claim was lost on the way counts as that claim and its release in one. So it ends a lease only where
  no other reader has time left, and only where its host was given the engine's card; else the lease runs to its time.
- One claimant fills neither a lease (`MAX_READERS_OF_ONE`) nor the table (`MAX_HELD`).
- A host, or an engine of another user here, asks for `LeaseSettings.peer_seconds` at most in one claim, and for
  `LeaseSettings.max_seconds` in all after the lease was opened. It gets what the owner's scheduler confirms.
- An engine of another user that was not given the owner's card is a stranger. Its claim holds a lease for as long as
  its owner keeps it unasked, and its release ends none.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who claims leases. ``name`` is a local client's incarnation, or a host's key (`host_claimant`).

    ``peer``: it is on another host or of another user, or cannot be told from one. ``knows``: it was given the card of
    the engine. ``stranger``: it was not, and is another user's engine here: it keeps nothing and ends nothing.
    """

    name: str
    peer: bool = False
    knows: bool = True
    stranger: bool = False


def host_claimant(key: bytes, *, knows: bool) -> Claimant:
    """Whoever speaks with that key; without keys all peers are one."""
    return Claimant(f"key:{key.decode('ascii', 'replace')}", peer=True, knows=knows)
