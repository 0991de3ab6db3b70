"""Who claims leases, and what kvd knows of them."""

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
