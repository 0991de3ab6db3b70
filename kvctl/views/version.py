"""The Version document: what `kvctl version` prints."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class Daemon(Struct, frozen=True, kw_only=True):
    """The kvd that answered."""

    version: str
    kvd_id: str
    address: str


class Version(Struct, frozen=True, kw_only=True):
    """The versions of both sides."""

    kvctl: str
    python: str
    wire_version: Annotated[int, Meta(description="version of the wire that this kvctl speaks")]
    daemon: Annotated[Daemon | None, Meta(description="null when no kvd answered")]
