"""Plan a local worker against a remote engine: which bytes of which pages to copy, before any request is known.

A plan is made once for a pair and holds absolute addresses of block 0 and strides; `kvd.topology.compile` makes
descriptors of it and of a request's block ids.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm
from typing import NamedTuple

from kvd.geometry.model import Group, Layer, Page, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.topology.errors import BlockMismatch, LayerMissing
from kvd.topology.grid import Cells, Grid, grid_of
from kvd.topology.reads import LayerPieces, Read, ReadShapes
from kvd.topology.sources import CutPage, Holder, Piece, Rotation, cut_page, pieces, rotations, suppliers


@dataclass(frozen=True)
class Plan:
    """All reads of one local worker from one remote engine. ``remote_ranks[read.remote]`` is whom to read from."""

    local_rank: Rank
    remote_ranks: tuple[Rank, ...]
    reads: tuple[Read, ...]
    block_sizes: tuple[int, ...]
    remote_block_sizes: tuple[int, ...]
    local_blocks: int
    remote_blocks: tuple[int, ...]
    pattern: object = field(default_factory=object, compare=False, repr=False)
    """The same object in plans that differ in nothing but where the local worker's memory stands."""

    @property
    def sources(self) -> tuple[int, ...]:
        """Positions of the remote workers that are read from, in order."""
        return tuple(sorted({read.remote for read in self.reads}))

    @cached_property
    def grids(self) -> dict[int, tuple[Grid, dict[int, Cells]]]:
        """By position of the remote worker: its reads as one grid, and the cells of each read (by its id)."""
        return {
            position: grid_of(
                [read for read in self.reads if read.remote == position],
                self.local_blocks,
                self.remote_blocks[position],
            )
            for position in self.sources
        }

    @cached_property
    def numbered(self) -> bool:
        """Whether 32 bits number the cells of all `grids`."""
        return all(grid.numbered for grid, _ in self.grids.values())

    @cached_property
    def straight(self) -> tuple[Read, ...]:
        """All reads, where whole blocks of one worker meet one to one in each: the plan is that simple. Else none."""
        simple = self.numbered and len(self.sources) == 1 and all(map(_one_to_one, self.reads))
        return self.reads if simple else ()


def _one_to_one(read: Read) -> bool:
    if read.kind == "mamba":
        return True
    return read.window is None and read.phase.local_period == read.phase.remote_period == 1


@dataclass(frozen=True, slots=True)
class Cuts:
    """What plans of several workers of one engine have in common: how pages are cut, and which workers have which."""

    pages: dict[int, CutPage] = field(default_factory=dict)
    kinds: dict[int, _Kinds] = field(default_factory=dict)
    """By identity of the workers' tuple: `peers` and `remotes` are the same objects in all of these plans."""
    numbers: dict[object, int] = field(default_factory=dict)
    shapes: ReadShapes = field(default_factory=ReadShapes)
    places: dict[int, dict[Rank, int]] = field(default_factory=dict)
    tails: dict[int, tuple[tuple[Rank, ...], tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    turns: dict[int, list[_Turn]] = field(default_factory=dict)
    supplies: dict[tuple[int, tuple[Rotation, ...]], _Supply] = field(default_factory=dict)
    patterns: dict[object, _Pattern] = field(default_factory=dict)


def plan_worker(
    local: WorkerGeometry,
    peers: Sequence[WorkerGeometry],
    remotes: Sequence[WorkerGeometry],
    cuts: Cuts | None = None,
) -> Plan:
    """The plan for ``local`` to read all its layers from the workers of a remote engine.

    ``peers`` are all workers of the local engine, ``local`` among them: replicas share the work. Layers are matched by
    name. ``cuts``, of the same ``peers`` and ``remotes``, spares work where others of the peers were planned before.
    Raises `LayerMissing`, `FieldMismatch`, `NotCovered` or `BlockMismatch`.
    """
    cuts = Cuts() if cuts is None else cuts
    supplied = _supplied(local, peers, remotes, cuts)
    start = local.regions[0].address if local.regions else 0
    apart = tuple([region.address - start for region in local.regions])
    key = id(local.groups), tuple(map(id, supplied.values())), apart
    pattern = cuts.patterns.get(key)
    if pattern is None:
        found = _found(cuts.turns[id(local.groups)], supplied, cuts.kinds[id(remotes)])
        reads = tuple([_read(local, remotes, alike, parts, cuts.shapes) for alike, parts in found.items()])
        pattern = cuts.patterns[key] = _Pattern(start, reads)
    return _plan(local, remotes, pattern.reads_at(start), cuts, pattern)


def sources_of(
    local: WorkerGeometry,
    peers: Sequence[WorkerGeometry],
    remotes: Sequence[WorkerGeometry],
    cuts: Cuts,
) -> tuple[int, ...]:
    """`Plan.sources` of `plan_worker`, at a fraction of its cost. Raises as it does, but no `BlockMismatch`."""
    supplied = _supplied(local, peers, remotes, cuts)
    turns = {(n := t.wanted.number, t.turn % supplied[n].period) for t in cuts.turns[id(local.groups)]}
    found = [suppliers(supplied[number].cut, supplied[number].taken, turn) for number, turn in turns]
    return tuple(sorted(set().union(*found)))


def plan_layers(
    local: WorkerGeometry,
    peers: Sequence[WorkerGeometry],
    remotes: Sequence[WorkerGeometry],
    of: Container[str] | None = None,
    source: int | None = None,
) -> dict[str, Plan]:
    """`plan_worker` layer by layer: a plan for each, which together read the same bytes from the same workers.

    A layer that reuses another's cache has none: its bytes move with the other's. With ``of`` only these layers are
    planned, and ``remotes`` need be no more than those that hold one of them. With ``source`` only what the remote
    worker in that position supplies is.
    """
    reads: dict[str, list[Read]] = {}
    cuts = Cuts()
    supplied = _supplied(local, peers, remotes, cuts, of)
    found = _found(cuts.turns[id(local.groups)], supplied, cuts.kinds[id(remotes)])
    for alike, parts in found.items():
        for part in parts if source in (None, parts[0][2].remote) else ():
            reads.setdefault(part[0].name, []).append(_read(local, remotes, alike, [part], cuts.shapes))
    return {
        name: _plan(local, remotes, reads[name], cuts, object()) for name in local.layers if name in reads
    }


def plan_part(
    local: WorkerGeometry,
    peers: Sequence[WorkerGeometry],
    remotes: Sequence[WorkerGeometry],
    of: Container[str],
    source: Rank,
) -> Plan:
    """`plan_worker` of some layers and of what one remote worker supplies: the same bytes of these."""
    cuts = Cuts()
    supplied = _supplied(local, peers, remotes, cuts, of)
    found = _found(cuts.turns[id(local.groups)], supplied, cuts.kinds[id(remotes)])
    reads = [
        _read(local, remotes, alike, parts, cuts.shapes)
        for alike, parts in found.items()
        if remotes[parts[0][2].remote].rank == source
    ]
    return _plan(local, remotes, reads, cuts, object())


class _Alike(NamedTuple):
    """What the layers of one read have in common; ``piece`` is the identity of the piece (its rank and phase)."""

    group: int
    remote_group: int
    local_stride: int
    remote_stride: int
    piece: int


class _Kinds(NamedTuple):
    """Workers of an engine by what they share: those with the same groups have the same layers.

    ``layers`` are of each kind, ``of`` the kind of each worker. Thousands of workers have a few kinds between them.
    """

    layers: list[dict[str, tuple[Group, Layer]]]
    of: list[int]


class _Wanted(NamedTuple):
    """A layer as all workers of one kind want it: what decides how it is cut, and who has it."""

    number: int  # the same for layers that are cut alike
    group: Group
    page: Page
    having: list[tuple[Group, Layer] | None]
    pages: list[Page | None]


def _kinds(workers: Sequence[WorkerGeometry]) -> _Kinds:
    number: dict[int, int] = {}
    layers: list[dict[str, tuple[Group, Layer]]] = []
    of = []
    for worker in workers:
        kind = number.setdefault(id(worker.groups), len(layers))
        if kind == len(layers):
            layers.append(worker.layers)
        of.append(kind)
    return _Kinds(layers, of)


class _Turn(NamedTuple):
    """A layer that is read, and its ordinal among all of the worker's that are."""

    turn: int
    layer: Layer
    wanted: _Wanted


@dataclass(frozen=True, slots=True)
class _Supply:
    """Pages that meet in the same way, and workers that take them in the same rotation: the pieces of each turn."""

    cut: CutPage
    taken: tuple[Rotation, ...]
    period: int
    made: dict[int, list[Piece]] = field(default_factory=dict)

    def pieces(self, turn: int) -> list[Piece]:
        turn %= self.period
        if turn not in self.made:
            self.made[turn] = pieces(self.cut, self.taken, turn)
        return self.made[turn]


class _Pattern(NamedTuple):
    """What workers of one kind read that are supplied alike: ``reads`` of the one whose memory begins at ``start``."""

    start: int
    reads: tuple[Read, ...]

    def reads_at(self, start: int) -> tuple[Read, ...]:
        by = start - self.start
        return (
            tuple([Read(r.remote, r.shape, r.here + by, r.there) for r in self.reads]) if by else self.reads
        )


def _supplied(
    local: WorkerGeometry,
    peers: Sequence[WorkerGeometry],
    remotes: Sequence[WorkerGeometry],
    cuts: Cuts,
    of: Container[str] | None = None,
) -> dict[int, _Supply]:
    """Who supplies this worker's pages, by the number of how they are cut, in the order of its layers.

    Of all layers, or only ``of`` these; whose turn it is to supply one is the same either way.
    """
    for workers in (peers, remotes):
        if id(workers) not in cuts.kinds:
            cuts.kinds[id(workers)] = _kinds(workers)
    ours, theirs = cuts.kinds[id(peers)], cuts.kinds[id(remotes)]
    # By identity: all workers of a kind share one tuple of groups, which the caller's workers keep.
    kind = id(local.groups)
    if kind not in cuts.turns:
        cuts.turns[kind] = [
            _Turn(turn, layer, _wanted(layer, group, ours, theirs, cuts.numbers))
            for turn, (group, layer) in enumerate(_placed(local.groups))
            if of is None or layer.name in of
        ]
    wanted = {turn.wanted.number: turn.wanted for turn in cuts.turns[kind]}
    return {number: _supply(one, local.rank, peers, ours, theirs, cuts) for number, one in wanted.items()}


def _placed(groups: Sequence[Group]) -> Iterator[tuple[Group, Layer]]:
    """Layers with memory of their own: those that reuse another's cache stand at its address, and move with it."""
    for group in groups:
        placed: set[tuple[int, int, int]] = set()
        for layer in group.layers:
            place = (layer.region, layer.offset, layer.stride)
            if place not in placed:
                placed.add(place)
                yield group, layer


def _found(
    turns: Sequence[_Turn], supplied: Mapping[int, _Supply], theirs: _Kinds
) -> dict[_Alike, list[tuple[Layer, Layer, Piece]]]:
    """Which piece of which remote layer belongs in which local layer, by what makes layers one read."""
    found: dict[_Alike, list[tuple[Layer, Layer, Piece]]] = {}
    for turn, layer, wanted in turns:
        for piece in supplied[wanted.number].pieces(turn):
            held = wanted.having[theirs.of[piece.remote]]
            if held is not None:  # always: a piece is of one that has the layer
                group, other = held
                alike = _Alike(wanted.group.index, group.index, layer.stride, other.stride, id(piece))
                found.setdefault(alike, []).append((layer, other, piece))
    return found


def _plan(
    local: WorkerGeometry,
    remotes: Sequence[WorkerGeometry],
    reads: Sequence[Read],
    cuts: Cuts,
    pattern: object,
) -> Plan:
    if id(remotes) not in cuts.tails:
        ranks, blocks = tuple(w.rank for w in remotes), tuple(w.num_blocks for w in remotes)
        cuts.tails[id(remotes)] = (ranks, _block_sizes(remotes), blocks)
    ranks, sizes, blocks = cuts.tails[id(remotes)]
    return Plan(
        local_rank=local.rank,
        remote_ranks=ranks,
        reads=tuple(reads),
        block_sizes=tuple(g.block_size for g in local.groups),
        remote_block_sizes=sizes,
        local_blocks=local.num_blocks,
        remote_blocks=blocks,
        pattern=pattern,
    )


def _block_sizes(remotes: Sequence[WorkerGeometry]) -> tuple[int, ...]:
    """Block sizes by group of a remote engine. Raises `BlockMismatch` where its workers disagree."""
    sizes: dict[int, tuple[int, Rank]] = {}
    for worker in remotes:
        for group in worker.groups:
            size, rank = sizes.setdefault(group.index, (group.block_size, worker.rank))
            if size != group.block_size:
                raise BlockMismatch(
                    f"remote group {group.index} has blocks of {size} tokens on {rank}"
                    f" and of {group.block_size} on {worker.rank}"
                )
    return tuple(sizes[index][0] for index in sorted(sizes))


def _wanted(layer: Layer, group: Group, ours: _Kinds, theirs: _Kinds, numbers: dict[object, int]) -> _Wanted:
    """Raises `LayerMissing` where no remote worker has the layer, or not as one of its kind."""
    having = [layers.get(layer.name) for layers in theirs.layers]
    if not any(having):
        raise LayerMissing(
            f"layer {layer.name} (group {group.index}) is on none of {len(theirs.of)} remote workers"
        )
    for found in having:
        if found is not None and (found[0].kind == "mamba") != (group.kind == "mamba"):
            raise LayerMissing(f"layer {layer.name} is of kind {group.kind} here and {found[0].kind} there")
    pages = [layers[layer.name][1].page if layer.name in layers else None for layers in ours.layers]
    held = tuple(found and (found[1].page, found[0].block_size) for found in having)
    key = (group.kind, group.block_size, layer.page, held, tuple(pages))
    return _Wanted(numbers.setdefault(key, len(numbers)), group, layer.page, having, pages)


def _supply(
    wanted: _Wanted,
    rank: Rank,
    peers: Sequence[WorkerGeometry],
    ours: _Kinds,
    theirs: _Kinds,
    cuts: Cuts,
) -> _Supply:
    number = wanted.number
    if number not in cuts.pages:
        sharing = [
            (worker.rank, page)
            for worker, kind in zip(peers, ours.of, strict=True)
            if (page := wanted.pages[kind]) is not None
        ]
        holders = tuple(
            Holder(i, found[1].page, found[0].block_size)
            for i, kind in enumerate(theirs.of)
            if (found := wanted.having[kind]) is not None
        )
        sharers = [page for _, page in sharing] or [wanted.page]
        cuts.pages[number] = cut_page(wanted.group, wanted.page, holders, sharers)
        cuts.places[number] = {other: i for i, (other, _) in enumerate(sharing)}
    cut = cuts.pages[number]
    taken = rotations(cut, cuts.places[number].get(rank, 0))
    if (number, taken) not in cuts.supplies:
        cuts.supplies[number, taken] = _Supply(cut, taken, lcm(*{one.period for one in taken}))
    return cuts.supplies[number, taken]


def _read(
    local: WorkerGeometry,
    remotes: Sequence[WorkerGeometry],
    alike: _Alike,
    parts: LayerPieces,
    shapes: ReadShapes,
) -> Read:
    remote = remotes[parts[0][2].remote]
    return shapes.read(
        local.groups[alike.group],
        alike.remote_group,
        parts,
        [local.page_address(layer) for layer, _, _ in parts],
        [remote.page_address(layer) for _, layer, _ in parts],
    )
