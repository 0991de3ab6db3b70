"""What a worker's KV cache looks like, byte for byte: axes, fields, pages, layers, groups, workers, engines.

A *field* is one logical tensor inside a page (``k``, ``v``, ``latent``, ``conv.x``, ``ssm``). On a worker it is a
strided box of that logical tensor. Each axis has the global index of its first element, how many elements it holds, the
global step between them and the byte stride. Nothing here knows about NHD or HND, about joined K and V, about
replicated heads: those are only other numbers in the same axes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import msgspec

from kvd.geometry.errors import NotTold
from kvd.geometry.rank import Rank

GroupKind = Literal["full", "sliding_window", "chunked", "mla", "mamba"]
"""How a group's blocks relate to tokens; ``mamba`` pages hold a state and cover no tokens of their own."""


class Axis(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One axis of a field on one worker.

    Elements ``i`` in ``range(extent)`` stand at global index ``start + i * step`` of the label and ``i * stride`` bytes
    into the field. A label may appear on several axes (a page of kernel blocks splits ``token`` in two): its global
    index is then the sum over them.
    """

    label: str
    start: int
    extent: int
    step: int
    stride: int


@dataclass(frozen=True, slots=True)
class Field:
    """One logical tensor inside a page.

    ``itemsize`` is in bytes, ``offset`` in bytes from the page's first byte. ``shape`` gives the full logical tensor's
    extent for each label (over all ranks), so that two engines that disagree about the tensor itself are told so.
    """

    name: str
    dtype: str
    itemsize: int
    offset: int
    axes: tuple[Axis, ...]
    shape: tuple[tuple[str, int], ...]

    @property
    def elements(self) -> int:
        """Number of elements this worker holds."""
        count = 1
        for axis in self.axes:
            count *= axis.extent
        return count

    @property
    def nbytes(self) -> int:
        """Bytes this worker holds of the field, without any padding between elements."""
        return self.elements * self.itemsize

    @property
    def end(self) -> int:
        """First byte of the page that no element of this field can reach."""
        return self.offset + sum((a.extent - 1) * a.stride for a in self.axes) + self.itemsize

    def axes_of(self, label: str) -> tuple[Axis, ...]:
        """The axes that carry ``label``, in the order they were given."""
        return tuple(a for a in self.axes if a.label == label)

    @property
    def labels(self) -> tuple[str, ...]:
        """The distinct labels, in order of first appearance."""
        return tuple(dict.fromkeys(a.label for a in self.axes))


@dataclass(frozen=True)
class Page:
    """The bytes of one block of one layer on one worker.

    ``size`` is the page's extent in bytes without padding up to the next page; the fields lie inside it. Frozen and
    hashable: layers of one shape share one page, and tables computed for a pair of pages are cached by it.
    """

    size: int
    fields: tuple[Field, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.size, self.fields))

    def __hash__(self) -> int:
        """Computed once: planning looks pages up for every layer of every pair of workers."""
        return self._hash

    @cached_property
    def content(self) -> int:
        """Bytes of all fields of one page (``bytes_per_block`` on the screen)."""
        return sum(f.nbytes for f in self.fields)

    @cached_property
    def end(self) -> int:
        """First byte of the page that no element of any field can reach."""
        return max(f.end for f in self.fields)

    @cached_property
    def by_name(self) -> dict[str, Field]:
        """The fields by name."""
        return {f.name: f for f in self.fields}


class Region(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One span of memory registered with a backend: base address, length in bytes, device ("cpu", "cuda:0")."""

    address: int
    length: int
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Layer:
    """Where one layer's pages stand: page ``b`` starts at ``regions[region].address + offset + b * stride``."""

    name: str
    page: Page
    region: int
    offset: int
    stride: int


@dataclass(frozen=True)
class Group:
    """A vLLM KV cache group: layers that share one block table.

    ``block_size`` is the number of consecutive tokens that one block covers on the engine as a whole (a
    context-parallel rank holds every ``dcp``-th of them); for ``mamba`` the spacing of state checkpoints. ``window`` is
    the sliding window or chunk in tokens, ``scratch_blocks`` the trailing speculative blocks a state group keeps and
    that never move.
    """

    index: int
    kind: GroupKind
    block_size: int
    layers: tuple[Layer, ...]
    window: int | None = None
    scratch_blocks: int = 0

    @cached_property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the layers, in order."""
        return tuple(layer.name for layer in self.layers)


@dataclass(frozen=True)
class WorkerGeometry:
    """Everything about one worker's KV cache: rank, number of blocks, regions and groups."""

    rank: Rank
    num_blocks: int
    regions: tuple[Region, ...]
    groups: tuple[Group, ...]

    @cached_property
    def layers(self) -> dict[str, tuple[Group, Layer]]:
        """Each layer with its group, by name."""
        return {layer.name: (group, layer) for group in self.groups for layer in group.layers}

    def page_address(self, layer: Layer, block: int = 0) -> int:
        """Address of the first byte of a layer's page of ``block``."""
        return self.regions[layer.region].address + layer.offset + block * layer.stride


@dataclass(frozen=True)
class UntoldWorker(WorkerGeometry):
    """A worker of which no addresses are known here, and so no regions: plans know of it, and none may use it."""

    def page_address(self, layer: Layer, block: int = 0) -> int:
        """Raises `NotTold`."""
        del layer, block
        raise NotTold(self.rank, "addresses")


@dataclass(frozen=True)
class EngineGeometry:
    """One engine: its sizes, the facts that compatibility is decided on, and its workers' geometries.

    ``facts`` are named strings or numbers (model, dtype, cache dtype, layout, attention backend, connector and backend
    versions, transfer mode ...): `kvd.topology.compat` says which of them must agree.
    """

    engine_id: str
    generation: str
    model: str
    tp: int
    pp: int
    dcp: int
    workers: tuple[WorkerGeometry, ...]
    facts: dict[str, str | int | float | bool | None] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Number of workers when complete: decode context parallelism reuses the TP ranks."""
        return self.tp * self.pp

    @cached_property
    def by_rank(self) -> dict[Rank, WorkerGeometry]:
        """The workers by rank."""
        return {w.rank: w for w in self.workers}
