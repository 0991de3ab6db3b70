"""Which remote workers supply which part of one local page: atoms, holders, and an even spread over replicas.

For each field and label the local indices fall into classes by who else holds them (*atoms*). A cell, one atom a label,
is held whole by a holder or not at all, so choosing a holder for every cell covers the field exactly once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import gcd, lcm
from operator import and_
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvd.geometry.model import Field, Group, Page
from kvd.topology.descriptors import Descriptors, Flags, coalesce, concatenate
from kvd.topology.errors import FieldMismatch, NotCovered
from kvd.topology.intersect import Steps, classes, intersect, series, steps_of

Numbers = NDArray[np.intp]
FEW_CELLS = 1 << 16
"""Candidates over all phases of one page, up to which its cells are kept from turn to turn."""


class Holder(NamedTuple):
    """A remote worker (by position) that has the layer, its page of it and the block size of its group.

    A tuple, as `Phase` is: planning looks both up for every layer of every pair of workers.
    """

    remote: int
    page: Page
    block_size: int


class Phase(NamedTuple):
    """Which blocks meet: local ``m * local_period + local`` and remote ``m * remote_period + remote``, for every ``m``.

    Equal block sizes give one phase (0 of 1 on both sides).
    """

    local: int
    local_period: int
    remote: int
    remote_period: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one remote worker supplies of one page pair at one phase."""

    remote: int
    phase: Phase
    table: Descriptors
    heads: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class CutPage:
    """One local page, the remote pages that it is made of, and how they cut it: the same for every turn.

    ``cells`` are kept where they are few; many are made anew each time.
    """

    group: Group
    holders: Sequence[Holder]
    cuts: list[_Cut]
    cells: list[_Cell] | None
    made: dict[tuple[int, ...], list[Piece]] = field(default_factory=dict)
    """By which of its holders supplies each of the ``cells``."""
    tables: dict[tuple[bytes, bytes, bytes], Descriptors] = field(default_factory=dict)
    """By their content: holders of one page, phase and part give one table, the same object."""


def cut_page(group: Group, page: Page, holders: Sequence[Holder], sharers: Sequence[Page]) -> CutPage:
    """Cut a local page of ``group``. ``sharers`` are the pages that the workers of the local engine have of this layer.

    Raises `FieldMismatch` where the two sides do not mean the same tensor, `NotCovered` where nobody holds a part.
    """
    for other in dict.fromkeys(holder.page for holder in holders):
        _same_tensors(page, other, state=group.kind == "mamba")
    cuts = _cuts(page, holders, sharers)
    phases = lcm(group.block_size, *{h.block_size for h in holders}) // group.block_size
    few = group.kind == "mamba" or phases * len(holders) <= FEW_CELLS
    return CutPage(group, holders, cuts, list(_all_cells(group, holders, cuts)) if few else None)


class Rotation(NamedTuple):
    """How a reader goes through the holders of a cell: at each turn it takes one, ``step`` after the one before."""

    base: int
    first: int
    step: int
    among: int

    def at(self, turn: int) -> int:
        """Which of the holders it takes at this turn."""
        return self.base + (self.first + self.step * turn) % self.among

    @property
    def period(self) -> int:
        """After how many turns the same holder comes again."""
        return self.among // gcd(self.among, self.step)


def rotations(cut: CutPage, me: int) -> tuple[Rotation, ...]:
    """How a worker goes through the holders of each cell: workers with the same rotations are supplied alike.

    ``me`` is its position among those of the local engine that have this layer. Where several remote workers hold a
    cell, the local workers that need it take them in rotation, and go on to the next ones layer by layer, so that every
    replica carries an even load. Raises `NotCovered` where nobody holds a part.
    """
    return tuple([_rotation(part, me) for part in _cells_of(cut)])


def pieces(cut: CutPage, taken: Sequence[Rotation], turn: int) -> list[Piece]:
    """All pieces that make up one local page of a worker with these rotations; ``turn`` is the layer's ordinal."""
    key = tuple([rotation.at(turn) for rotation in taken])
    if cut.cells is None:
        return _pieces(cut, zip(_cells_of(cut), key, strict=True))
    if key not in cut.made:
        cut.made[key] = _pieces(cut, zip(cut.cells, key, strict=True))
    return cut.made[key]


def suppliers(cut: CutPage, taken: Sequence[Rotation], turn: int) -> set[int]:
    """The remote workers (by position) of `pieces`."""
    candidates = ((part, part.held[one.at(turn)]) for part, one in zip(_cells_of(cut), taken, strict=True))
    return {cut.holders[part.candidates[holding][0]].remote for part, holding in candidates}


def _cells_of(cut: CutPage) -> Iterable[_Cell]:
    return _all_cells(cut.group, cut.holders, cut.cuts) if cut.cells is None else cut.cells


def _rotation(part: _Cell, me: int) -> Rotation:
    """Where one number divides the other a reader keeps to its own share of the holders: fewer ranks to know."""
    place, readers, holders = int(part.sharing.searchsorted(me)), len(part.sharing), len(part.held)
    if holders % readers == 0:
        own = holders // readers
        return Rotation(place * own, 0, 1, own)
    if readers % holders == 0:
        return Rotation(place * holders // readers, 0, 0, 1)
    return Rotation(0, place % holders, readers % holders, holders)


def _pieces(cut: CutPage, chosen: Iterable[tuple[_Cell, int]]) -> list[Piece]:
    found: dict[tuple[int, Phase], list[Descriptors]] = {}
    heads: dict[tuple[int, Phase], tuple[int, int]] = {}
    for part, holding in chosen:
        number, phase, shift = part.candidates[part.held[holding]]
        holder, wanted = cut.holders[number], {label: atom.members for label, atom in part.atoms.items()}
        paired = (holder.remote, phase)
        for fld in part.cut.fields:
            table = intersect(fld, holder.page.by_name[fld.name], shift=shift, wanted=wanted)
            found.setdefault(paired, []).append(table)
        if "head" in part.atoms and any(fld.name == "k" for fld in part.cut.fields):
            low, high = _bounds(part.cut.mine["head"], wanted["head"])
            seen = heads.get(paired, (low, high + 1))
            heads[paired] = (min(low, seen[0]), max(high + 1, seen[1]))
    return [
        Piece(remote, phase, _one_of(cut.tables, coalesce(concatenate(tables))), heads.get((remote, phase)))
        for (remote, phase), tables in found.items()
    ]


def _one_of(known: dict[tuple[bytes, bytes, bytes], Descriptors], table: Descriptors) -> Descriptors:
    """The table of this content that there is already, else this one."""
    key = table.local.tobytes(), table.remote.tobytes(), table.length.tobytes()
    return known.setdefault(key, table)


_Candidate = tuple[int, Phase, int]
"""Number of a holder, the phase in which one of its blocks meets the local one, and how much higher its tokens are."""


def _overlaps(group: Group, holders: Sequence[Holder]) -> Iterator[list[_Candidate]]:
    """For each local phase, the candidates that overlap it. State pages meet one to one."""
    if group.kind == "mamba":
        yield [(number, Phase(0, 1, 0, 1), 0) for number in range(len(holders))]
        return
    period = lcm(group.block_size, *(h.block_size for h in holders))
    for j in range(period // group.block_size):
        first, last = j * group.block_size, (j + 1) * group.block_size
        yield [
            (
                number,
                Phase(j, period // group.block_size, k, period // h.block_size),
                k * h.block_size - first,
            )
            for number, h in enumerate(holders)
            for k in range(first // h.block_size, -(-last // h.block_size))
        ]


@dataclass(frozen=True, slots=True)
class _Atom:
    """A part of the local indices of one label that the same candidates hold and the same sharers need."""

    members: Flags
    held: Flags
    shared: Flags


@dataclass(frozen=True, slots=True)
class _Cut:
    """Fields of one page that every worker cuts alike, as keys and values are: what all hold of each label.

    ``theirs`` and ``sharers`` have one entry a holder and a sharer. ``atoms`` are those of every label but ``token``,
    with one flag a holder in ``held``: only tokens differ from phase to phase.
    """

    fields: tuple[Field, ...]
    mine: dict[str, Steps]
    theirs: dict[str, tuple[Steps, ...]]
    sharers: dict[str, tuple[Steps, ...]]
    atoms: dict[str, list[_Atom]]


def _cuts(page: Page, holders: Sequence[Holder], sharers: Sequence[Page]) -> list[_Cut]:
    # Thousands of workers have a few pages between them.
    pages = dict.fromkeys((*(holder.page for holder in holders), *sharers))
    alike: dict[object, list[Field]] = {}
    for fld in page.fields:
        sides = (fld, *(p.by_name[fld.name] for p in pages))
        alike.setdefault(tuple(tuple(steps_of(f, label) for f in sides) for label in fld.labels), []).append(
            fld
        )
    made = []
    for fields in alike.values():
        first = fields[0]
        mine = {label: steps_of(first, label) for label in first.labels}
        theirs: dict[str, tuple[Steps, ...]] = {}
        needing: dict[str, tuple[Steps, ...]] = {}
        for label in mine:
            steps = {p: steps_of(p.by_name[first.name], label) for p in pages}
            theirs[label] = tuple(steps[holder.page] for holder in holders)
            needing[label] = tuple(steps[p] for p in sharers)
        atoms = {
            label: _atoms(mine[label], [(steps, 0) for steps in theirs[label]], needing[label])
            for label in mine
            if label != "token"
        }
        made.append(_Cut(tuple(fields), mine, theirs, needing, atoms))
    return made


class _Cell(NamedTuple):
    """A part of the local page that is held whole or not at all: by which candidates, and which sharers need it."""

    cut: _Cut
    candidates: Sequence[_Candidate]
    atoms: dict[str, _Atom]
    held: Numbers
    sharing: Numbers


def _all_cells(group: Group, holders: Sequence[Holder], cuts: Sequence[_Cut]) -> Iterator[_Cell]:
    for candidates in _overlaps(group, holders):
        for cut in cuts:
            yield from _cells(cut, candidates)


def _cells(cut: _Cut, candidates: Sequence[_Candidate]) -> Iterator[_Cell]:
    """The cells of one phase."""
    numbers = [number for number, _, _ in candidates]
    parts = []
    for label in cut.mine:
        if label == "token":
            theirs = [(cut.theirs[label][number], shift) for number, _, shift in candidates]
            parts.append(_atoms(cut.mine[label], theirs, cut.sharers[label]))
        else:
            parts.append([_Atom(a.members, a.held[numbers], a.shared) for a in cut.atoms[label]])
    for atoms in itertools.product(*parts):
        held = reduce(and_, [atom.held for atom in atoms]).nonzero()[0]
        cell = dict(zip(cut.mine, atoms, strict=True))
        if not len(held):
            spans = {label: _bounds(cut.mine[label], atom.members) for label, atom in cell.items()}
            part = ", ".join(f"{label} {low}..{high}" for label, (low, high) in spans.items())
            raise NotCovered(
                f"field {cut.fields[0].name}: none of {len(candidates)} remote pages holds {part}"
            )
        sharing = reduce(and_, [atom.shared for atom in atoms]).nonzero()[0]
        yield _Cell(cut, candidates, cell, held, sharing)


def _bounds(steps: Steps, members: Flags) -> tuple[int, int]:
    """The least and the greatest of the numbers chosen."""
    part = series(steps)[members]
    return int(part.min()), int(part.max())


def _atoms(mine: Steps, theirs: Sequence[tuple[Steps, int]], sharers: Sequence[Steps]) -> list[_Atom]:
    """Classes of ``mine``; ``theirs`` are with how much higher their numbers are."""
    # Most candidates are replicas of each other or miss the label's part altogether: few of them are distinct.
    distinct: dict[tuple[Steps, int], int] = {}
    columns = [distinct.setdefault(one, len(distinct)) for one in theirs]
    needing = [distinct.setdefault((steps, 0), len(distinct)) for steps in sharers]
    return [
        _Atom(members, holding[columns], holding[needing])
        for members, holding in classes(mine, tuple(distinct))
    ]


def _same_tensors(mine: Page, theirs: Page, *, state: bool) -> None:
    """Raise `FieldMismatch` unless both pages hold shards of the same logical tensors."""
    if mine.by_name.keys() != theirs.by_name.keys():
        raise FieldMismatch(
            f"a page holds {', '.join(mine.by_name)} here and {', '.join(theirs.by_name)} there"
        )
    for fld in mine.fields:
        other = theirs.by_name[fld.name]
        if (fld.dtype, fld.itemsize) != (other.dtype, other.itemsize):
            raise FieldMismatch(
                f"field {fld.name} is {fld.dtype} ({fld.itemsize} bytes) here"
                f" and {other.dtype} ({other.itemsize} bytes) there"
            )
        here, there = dict(fld.shape), dict(other.shape)
        if not state:
            # Block sizes may differ, so the extent of `token` may too; a state has no tokens and must agree in all.
            here.pop("token", None)
            there.pop("token", None)
        for label in {**here, **there}:
            if here.get(label) != there.get(label):
                raise FieldMismatch(
                    f"field {fld.name} has {here.get(label)} of {label} here and {there.get(label)} there"
                )
