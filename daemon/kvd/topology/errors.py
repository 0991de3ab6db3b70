"""Errors of topology.

TopologyError            code; message with both values
├── FieldMismatch        a field differs between the two sides in type, size or presence
├── NotCovered           no remote worker holds a part that is needed
├── LayerMissing         a layer of this side that no remote worker has
├── BlockMismatch        block ids that do not fit the plan (out of range, missing, too many)
├── TooMuchToCompare     two engines whose comparison would take too long
├── NotSummable          a page of which no checksum can be had
├── OwnEngine            an engine was to be its own peer
└── UnknownEngine        a question about an engine or worker that was never registered
"""

from __future__ import annotations

from kvd.errors import KvdError


class TopologyError(KvdError, ValueError):
    """Two sides that cannot be mapped onto each other, or a request that does not fit the mapping."""

    code = "KVD-TOPOLOGY"


class FieldMismatch(TopologyError):
    """A field differs between the two sides."""

    code = "KVD-TOPOLOGY-FIELD"


class NotCovered(TopologyError):
    """No remote worker holds a part that is needed."""

    code = "KVD-TOPOLOGY-NOT-COVERED"


class LayerMissing(TopologyError):
    """A layer of this side that no remote worker has."""

    code = "KVD-TOPOLOGY-LAYER"


class BlockMismatch(TopologyError):
    """Block ids that do not fit the plan."""

    code = "KVD-TOPOLOGY-BLOCKS"


class TooMuchToCompare(TopologyError):
    """Two engines that cannot be compared in a time that anybody would wait."""

    code = "KVD-TOPOLOGY-TOO-MUCH"


class NotSummable(TopologyError):
    """A page whose elements or shares have a form that checksums do not cover."""

    code = "KVD-TOPOLOGY-CHECKSUM"


class OwnEngine(TopologyError):
    """An engine was to be its own peer."""

    code = "KVD-TOPOLOGY-OWN-ENGINE"


class UnknownEngine(TopologyError):
    """A question about an engine or a worker that was never registered."""

    code = "KVD-TOPOLOGY-UNKNOWN-ENGINE"
