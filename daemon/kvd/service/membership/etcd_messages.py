"""The messages of etcd's JSON gateway that kvd uses, and what kvd writes of itself there.

The gateway writes 64-bit numbers as strings and bytes in base64, and leaves out what is zero.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Generic, TypeVar

import msgspec
from msgspec import Meta

LONGEST_VALUE = 4096
"""Bytes of a value; a host's has some 200."""
LONGEST_KEY = 1024

Told = TypeVar("Told")


class HostValue(msgspec.Struct, frozen=True, kw_only=True):
    """What a kvd writes of itself, as JSON. ``key`` is its public CURVE key, empty without; it is only compared."""

    address: Annotated[str, Meta(max_length=300)]
    generation: Annotated[str, Meta(max_length=64)] = ""
    key: Annotated[str, Meta(max_length=64)] = ""
    version: Annotated[str, Meta(max_length=64)] = ""


class Question(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request; ``path`` is where it is posted to."""

    path: ClassVar[str]


class LeaseGrant(Question, frozen=True, kw_only=True):
    """A lease of so many seconds."""

    path: ClassVar[str] = "/v3/lease/grant"
    seconds: int = msgspec.field(name="TTL")


class LeaseKeepAlive(Question, frozen=True, kw_only=True):
    """The lease begins anew."""

    path: ClassVar[str] = "/v3/lease/keepalive"
    lease: int = msgspec.field(name="ID")


class LeaseRevoke(Question, frozen=True, kw_only=True):
    """The lease ends now, and with it all keys under it."""

    path: ClassVar[str] = "/v3/lease/revoke"
    lease: int = msgspec.field(name="ID")


class Put(Question, frozen=True, kw_only=True):
    """A value under a key, for as long as a lease lives."""

    path: ClassVar[str] = "/v3/kv/put"
    key: bytes
    value: bytes
    lease: int


class Range(Question, frozen=True, kw_only=True):
    """The values of all keys from ``key`` to before ``range_end``, as they were at a revision; 0: now."""

    path: ClassVar[str] = "/v3/kv/range"
    key: bytes
    range_end: bytes
    limit: int
    revision: int = 0


class WatchCreate(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be watched, and from which revision on."""

    key: bytes
    range_end: bytes
    start_revision: int


class WatchQuestion(Question, frozen=True, kw_only=True):
    """What changes is to be told."""

    path: ClassVar[str] = "/v3/watch"
    create_request: WatchCreate


class EtcdHeader(msgspec.Struct, frozen=True):
    """The revision of etcd's data that an answer is of."""

    revision: int = 0


class LeaseAnswer(msgspec.Struct, frozen=True):
    """A lease and the seconds that it has; none: etcd does not know it."""

    lease: int = msgspec.field(name="ID", default=0)
    seconds: int = msgspec.field(name="TTL", default=0)


class LeaseRevoked(msgspec.Struct, frozen=True):
    """It has ended."""

    header: EtcdHeader = EtcdHeader()


class KeyValue(msgspec.Struct, frozen=True):
    """One key with its value."""

    key: bytes
    value: bytes = b""
    lease: int = 0


class RangeAnswer(msgspec.Struct, frozen=True):
    """Values, in the order of their keys; ``more``: there are further ones."""

    header: EtcdHeader = EtcdHeader()
    kvs: tuple[KeyValue, ...] = ()
    more: bool = False


class PutAnswer(msgspec.Struct, frozen=True):
    """It stands there."""

    header: EtcdHeader = EtcdHeader()


class WatchEvent(msgspec.Struct, frozen=True):
    """A key that was put (``type`` empty or PUT) or deleted."""

    kv: KeyValue
    type: str = "PUT"


class WatchAnswer(msgspec.Struct, frozen=True):
    """Changes, in their order, or that the watch begins or ends."""

    header: EtcdHeader = EtcdHeader()
    events: tuple[WatchEvent, ...] = ()
    canceled: bool = False
    cancel_reason: str = ""
    compact_revision: int = 0


class Streamed(msgspec.Struct, Generic[Told], frozen=True):
    """One message of an answer that has many."""

    result: Told | None = None


class Authenticated(msgspec.Struct, frozen=True):
    """By this token a user is known from now on."""

    token: str


class Failure(msgspec.Struct, frozen=True):
    """Why a request was refused."""

    error: str
