"""The codes of refusals: what one program of kvd's answers another with, and what counts and exit codes go by.

Each stands here once. A code keeps its meaning for good, and one that is given up is not used again.
"""

from __future__ import annotations

from typing import Literal, NewType, TypeAlias, get_args

RefusalCode: TypeAlias = Literal[
    # A message that cannot be taken.
    "KVD-BAD-CARD",
    "KVD-BAD-ORDER",
    "KVD-BAD-PUSH",
    "KVD-BAD-QUERY",
    "KVD-NOT-HERE",
    "KVD-QUESTION-TOO-LONG",
    "KVD-TOO-LARGE",
    "KVD-WIRE",
    "KVD-WIRE-MALFORMED",
    "KVD-WIRE-UNKNOWN",
    "KVD-WIRE-VERSION",
    # A geometry that cannot be used (kvd.geometry.errors).
    "KVD-GEOMETRY",
    "KVD-GEOMETRY-BAD",
    "KVD-GEOMETRY-LAYER-IN-TWO-GROUPS",
    "KVD-GEOMETRY-UNEVEN",
    "KVD-GEOMETRY-UNKNOWN-SHAPE",
    # Who may say what.
    "KVD-KEY-REVOKED",
    "KVD-NOT-DESCRIBED",
    "KVD-NOT-OWNER",
    "KVD-NOT-PERMITTED",
    "KVD-NOT-REGISTERED",
    "KVD-NOT-YOUR-ENGINE",
    "KVD-OWN-GENERATION",
    # What is there, and what is not.
    "KVD-ENGINE-CONFLICT",
    "KVD-ENGINE-DRAINING",
    "KVD-ENGINE-GONE",
    "KVD-ENGINE-PARTIAL",
    "KVD-ENGINE-UNKNOWN",
    "KVD-LEASE-UNKNOWN",
    "KVD-NO-ENGINE",
    "KVD-ORDER-UNKNOWN",
    "KVD-RANK-TAKEN",
    "KVD-RANK-UNKNOWN",
    "KVD-WORKER-AWAY",
    # Other kvds and their engines.
    "KVD-COMPARE-LIMIT",
    "KVD-COMPARE-UNAVAILABLE",
    "KVD-INCOMPATIBLE",
    "KVD-NO-WAY-BACK",
    "KVD-PEER-ADDRESS",
    "KVD-PEER-CARD",
    "KVD-PEER-CONTRADICTION",
    "KVD-PEER-GENERATION",
    "KVD-PEER-PROTOCOL",
    "KVD-PEER-UNREACHABLE",
    # No room, or not now.
    "KVD-BUSY",
    "KVD-DRAINING",
    "KVD-INTERNAL",
    "KVD-LEDGER",
    "KVD-TOO-MANY",
    "KVD-TOO-MANY-READERS",
    # What an engine answers.
    "KVD-CLIENT-ERROR",
    "KVD-CLIENT-PROTOCOL",
    "KVD-CONNECTOR-PUSH",
    "KVD-CONNECTOR-SUMS",
    "KVD-EVICT-BUSY",
    "KVD-EVICT-UNKNOWN",
    "KVD-FORCE-BUSY",
    "KVD-FORCE-LATE",
    "KVD-FORCE-PART",
    "KVD-FORCE-POLICY",
    "KVD-FORCE-ROLE",
    "KVD-FORCE-UNKNOWN",
    "KVD-NOT-TAKEN",
]

OthersCode = NewType("OthersCode", str)
"""A code that another program sent: one of ours, one of another version of kvd, or anything at all."""

CODES: frozenset[str] = frozenset(get_args(RefusalCode))
"""All of ours."""
OTHER = "OTHER"
"""What any other code is counted as: each name of a counter is a metric, and others may make up codes."""


def counted_as(code: str) -> str:
    """The name under which a refusal of that code is counted."""
    return code if code in CODES else OTHER
