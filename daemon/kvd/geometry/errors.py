"""Errors of geometry.

GeometryError            code, message with both values
├── BadGeometry          a description that contradicts itself (a layer outside its region, two fields of one name ...)
├── LayerInTwoGroups     one layer in two KV cache groups; names both
├── NotTold              an address or metadata of a worker of which kvd told none here
├── UnevenShard          a size that cannot be split over so many ranks
└── UnknownShape         a live tensor or spec of a shape that this version does not know
"""

from __future__ import annotations

from kvd.errors import KvdError


class GeometryError(KvdError, ValueError):
    """A KV cache that cannot be described. ``code`` is stable; the message names the values that disagree."""

    code = "KVD-GEOMETRY"


class BadGeometry(GeometryError):
    """A description that contradicts itself."""

    code = "KVD-GEOMETRY-BAD"


class LayerInTwoGroups(GeometryError):
    """One layer stands in two KV cache groups."""

    code = "KVD-GEOMETRY-LAYER-IN-TWO-GROUPS"


class NotTold(GeometryError):
    """Addresses or metadata of a worker with which kvd found nothing to exchange, so that it told none."""

    code = "KVD-GEOMETRY-NOT-TOLD"

    def __init__(self, worker: object, what: str) -> None:
        """``what`` was not told of the ``worker``."""
        super().__init__(
            f"kvd told no {what} of the peer's worker {worker}, since it found nothing to exchange with it, but a plan"
            " needs them",
            hint="report this, with what `kvctl describe-topology` says of the two engines: no setting mends it",
        )


class UnevenShard(GeometryError):
    """A size that cannot be split over so many ranks: neither divides the other."""

    code = "KVD-GEOMETRY-UNEVEN"


class UnknownShape(GeometryError):
    """A live tensor or a spec of a shape that this version does not know."""

    code = "KVD-GEOMETRY-UNKNOWN-SHAPE"
