"""Which remote workers supply which part of one local page: atoms, holders, and an even spread over replicas.

For each field and label the local indices fall into classes by who else holds them (*atoms*). A cell, one atom a label,
is held whole by a holder or not at all, so choosing a holder for every cell covers the field exactly once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, lcm

import numpy as np

from kvd.geometry.model import Field, Group, Page
from kvd.topology.errors import FieldMismatch, NotCovered
from kvd.topology.intersect import Flags, Steps, Table, classes, intersect, series, stack, steps_of


@dataclass(frozen=True, slots=True)
class Holder:
    """A remote worker (by position) that has the layer, its page of it and the block size of its group."""

    remote: int
    page: Page
    block_size: int


@dataclass(frozen=True, slots=True)
class Phase:
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
    table: Table
    heads: tuple[int, int] | None


def pieces(
    group: Group, page: Page, holders: Sequence[Holder], sharers: Sequence[Page], me: int, turn: int
) -> tuple[int, list[Piece]]:
    """All pieces that make up one local page of ``group``, and after how many turns the same ones come again.

    ``sharers`` are the pages that the workers of the local engine have of this layer, ``me`` the position of this one
    among them; ``turn`` is the layer's ordinal. Where several remote workers hold a cell, the local workers that need
    it take them in rotation, and go on to the next ones layer by layer, so that every replica carries an even load.

    Raises `FieldMismatch` where the two sides do not mean the same tensor, `NotCovered` where nobody holds a part.
    """
    for holder in holders:
        _same_tensors(page, holder.page, state=group.kind == "mamba")
    found: dict[tuple[int, Phase], list[Table]] = {}
    heads: dict[tuple[int, Phase], tuple[int, int]] = {}
    repeat = 1
    for candidates in _meetings(group, holders):
        for fld in page.fields:
            for (holder, phase, shift), wanted, period in _cells(fld, candidates, sharers, me, turn):
                repeat = lcm(repeat, period)
                table = intersect(fld, holder.page.by_name[fld.name], shift=shift, wanted=wanted)
                found.setdefault((holder.remote, phase), []).append(table)
                if fld.name == "k" and "head" in wanted:
                    part = series(steps_of(fld, "head"))[wanted["head"]]
                    low, high = int(part.min()), int(part.max()) + 1
                    seen = heads.get((holder.remote, phase), (low, high))
                    heads[holder.remote, phase] = (min(low, seen[0]), max(high, seen[1]))
    return repeat, [
        Piece(remote, phase, stack(tables), heads.get((remote, phase)))
        for (remote, phase), tables in found.items()
    ]


_Candidate = tuple[Holder, Phase, int]
"""A holder, the phase in which one of its blocks meets the local one, and how much higher its tokens are."""


def _meetings(group: Group, holders: Sequence[Holder]) -> Iterator[list[_Candidate]]:
    """For each local phase, the candidates that overlap it. State pages meet one to one."""
    if group.kind == "mamba":
        yield [(h, Phase(0, 1, 0, 1), 0) for h in holders]
        return
    period = lcm(group.block_size, *(h.block_size for h in holders))
    for j in range(period // group.block_size):
        first, last = j * group.block_size, (j + 1) * group.block_size
        yield [
            (
                h,
                Phase(j, period // group.block_size, k, period // h.block_size),
                k * h.block_size - first,
            )
            for h in holders
            for k in range(first // h.block_size, -(-last // h.block_size))
        ]


def _cells(
    fld: Field, candidates: Sequence[_Candidate], sharers: Sequence[Page], me: int, turn: int
) -> Iterator[tuple[_Candidate, dict[str, Flags], int]]:
    """Each chosen candidate, the part of each label it supplies and the turns until it is chosen again, by cell."""
    atoms = [_atoms(fld, label, candidates, sharers) for label in fld.labels]
    for cell in itertools.product(*atoms):
        holders = np.flatnonzero(np.logical_and.reduce([atom.held for atom in cell]))
        wanted = {label: atom.members for label, atom in zip(fld.labels, cell, strict=True)}
        if not len(holders):
            part = ", ".join(f"{label} {_span(fld, label, flags)}" for label, flags in wanted.items())
            raise NotCovered(f"field {fld.name}: none of {len(candidates)} remote pages holds {part}")
        sharing = np.flatnonzero(np.logical_and.reduce([atom.shared for atom in cell]))
        chosen, period = _rotate(int(np.searchsorted(sharing, me)), len(sharing), len(holders), turn)
        yield candidates[holders[chosen]], wanted, period


def _span(fld: Field, label: str, members: Flags) -> str:
    part = series(steps_of(fld, label))[members]
    return f"{int(part.min())}..{int(part.max())}"


def _rotate(place: int, readers: int, holders: int, turn: int) -> tuple[int, int]:
    """Which of ``holders`` the reader at ``place`` takes at this turn, and after how many turns again.

    Where one number divides the other a reader keeps to its own share of the holders: fewer ranks to know.
    """
    if holders % readers == 0:
        own = holders // readers
        return place * own + turn % own, own
    if readers % holders == 0:
        return place * holders // readers, 1
    return (place + readers * turn) % holders, holders // gcd(holders, readers)


@dataclass(frozen=True, slots=True)
class _Atom:
    """A part of the local indices of one label that the same candidates hold and the same sharers need."""

    members: Flags
    held: Flags
    shared: Flags


def _atoms(fld: Field, label: str, candidates: Sequence[_Candidate], sharers: Sequence[Page]) -> list[_Atom]:
    # Most candidates are replicas of each other or miss the label's part altogether: few of them are distinct.
    distinct: dict[tuple[Steps, int], int] = {}
    columns = []
    for holder, _, shift in candidates:
        theirs = steps_of(holder.page.by_name[fld.name], label)
        columns.append(distinct.setdefault((theirs, shift if label == "token" else 0), len(distinct)))
    columns += [
        distinct.setdefault((steps_of(page.by_name[fld.name], label), 0), len(distinct)) for page in sharers
    ]
    n = len(candidates)
    return [
        _Atom(members, holding[columns[:n]], holding[columns[n:]])
        for members, holding in classes(steps_of(fld, label), tuple(distinct))
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
