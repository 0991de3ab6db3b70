"""A read: what one local worker takes from one remote worker. Reads that differ only in the workers share a shape.

The ranks of two engines meet in a pattern that repeats, so thousands of reads have a few hundred shapes between them.
Whatever no address decides (bytes, copies, how rows join) is worked out once a shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvd.geometry.model import Group, GroupKind, Layer
from kvd.topology.descriptors import Descriptors, Int64, coalesce
from kvd.topology.sources import Phase, Piece

Mask = NDArray[np.bool_]
LayerPieces = Sequence[tuple[Layer, Layer, Piece]]
"""Local layer, remote layer, and the piece of it: of all layers of one read."""


@dataclass(frozen=True, eq=False)
class ReadShape:
    """All of a read but its two workers; compared by identity.

    ``runs`` are the read's rows as offsets from block 0 of its first layer on either side. ``layer_bytes`` and
    ``layer_segments`` are of one page of one layer. ``heads`` are the first and one past the last of the model's heads,
    ``window`` is the local group's sliding window or chunk in tokens.
    """

    group: int
    remote_group: int
    kind: GroupKind
    phase: Phase
    layers: tuple[str, ...]
    runs: Descriptors
    local_stride: int
    remote_stride: int
    layer_bytes: int
    layer_segments: int
    heads: tuple[int, int] | None
    window: int | None

    @cached_property
    def bytes_per_block(self) -> int:
        """Bytes that such a read takes from one block, over all its layers."""
        return self.runs.nbytes

    @cached_property
    def filling(self) -> tuple[Mask, int]:
        """Which rows fill their stride on both sides, so that they go on in the next block, and how many do."""
        runs = self.runs
        mask: Mask = (runs.length == self.local_stride) & (runs.length == self.remote_stride)
        return mask, int(np.count_nonzero(mask))


class Read(Struct, frozen=True, dict=True):
    """What one remote worker supplies of one group, for all layers that it supplies in the same way.

    A struct, since large engines have tens of thousands of them.

    ``remote`` is that worker's position, ``here`` and ``there`` are the addresses of block 0 of the first layer.
    """

    remote: int
    shape: ReadShape
    here: int
    there: int

    @cached_property
    def rows(self) -> Descriptors:
        """Runs at absolute addresses for block 0 on both sides, over all layers; block ``b`` adds ``b * stride``."""
        runs = self.shape.runs
        return Descriptors(runs.local + self.here, runs.remote + self.there, runs.length)

    @property
    def group(self) -> int:
        """Index of the local group."""
        return self.shape.group

    @property
    def remote_group(self) -> int:
        """Index of the remote group."""
        return self.shape.remote_group

    @property
    def kind(self) -> GroupKind:
        """Of the local group."""
        return self.shape.kind

    @property
    def phase(self) -> Phase:
        """Which blocks meet."""
        return self.shape.phase

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers."""
        return self.shape.layers

    @property
    def local_stride(self) -> int:
        """Bytes from one local block to the next."""
        return self.shape.local_stride

    @property
    def remote_stride(self) -> int:
        """Bytes from one remote block to the next."""
        return self.shape.remote_stride

    @property
    def layer_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return self.shape.layer_bytes

    @property
    def layer_segments(self) -> int:
        """Copies of one page of one layer."""
        return self.shape.layer_segments

    @property
    def heads(self) -> tuple[int, int] | None:
        """First and one past the last of the model's heads."""
        return self.shape.heads

    @property
    def window(self) -> int | None:
        """The local group's window or chunk, in tokens."""
        return self.shape.window

    @property
    def bytes_per_block(self) -> int:
        """See `ReadShape`."""
        return self.shape.bytes_per_block

    @property
    def filling(self) -> tuple[Mask, int]:
        """See `ReadShape`."""
        return self.shape.filling


@dataclass(frozen=True, slots=True)
class ReadShapes:
    """The shapes of the reads made so far, by what decides them.

    Groups, tables and the like are looked up by identity: whoever keeps the shapes keeps them as well.
    """

    made: dict[object, ReadShape] = field(default_factory=dict)

    def read(
        self, group: Group, remote_group: int, parts: LayerPieces, here: Sequence[int], there: Sequence[int]
    ) -> Read:
        """The read of ``parts``, whose first blocks stand at the addresses ``here`` and ``there``."""
        first, other, piece = parts[0]
        names = tuple(layer.name for layer, _, _ in parts)
        from_here, from_there = here[0], there[0]
        apart = tuple(a - from_here for a in here), tuple(a - from_there for a in there)
        strides = first.stride, other.stride
        key = (id(group), remote_group, strides, id(piece.table), piece.phase, piece.heads, names, apart)
        shape = self.made.get(key)
        if shape is None:
            table = piece.table
            shape = self.made[key] = ReadShape(
                group=group.index,
                remote_group=remote_group,
                kind=group.kind,
                phase=piece.phase,
                layers=names,
                runs=_runs(table, *(np.array(side, np.int64) for side in apart)),
                local_stride=strides[0],
                remote_stride=strides[1],
                layer_bytes=table.nbytes,
                layer_segments=len(table),
                heads=piece.heads,
                window=group.window,
            )
        return Read(piece.remote, shape, from_here, from_there)


def _runs(table: Descriptors, here: Int64, there: Int64) -> Descriptors:
    """The table of one page at each layer's place, joined where layers stand next to each other on both sides."""
    return coalesce(
        Descriptors(
            (here[:, None] + table.local).ravel(),
            (there[:, None] + table.remote).ravel(),
            np.broadcast_to(table.length, (len(here), len(table))).ravel(),
        )
    )
