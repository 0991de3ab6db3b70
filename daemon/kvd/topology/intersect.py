"""The one operation of planning: intersect two shards of the same logical tensor and lower the result to byte runs.

For each label the coordinates of both boxes are matched; the byte offsets of the matches are two columns of numbers. A
field's runs are the outer sum of those columns over its labels, innermost first, joined wherever two neighbours are
adjacent on both sides. Layouts, joined K and V, kernel blocks and context-parallel interleaving need no case of their
own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from kvd.geometry.model import Axis, Field
from kvd.topology.descriptors import Descriptors, Flags, Int64, coalesce

Axes = tuple[Axis, ...]


Steps = tuple[tuple[int, int, int], ...]
"""A series of numbers as (start, extent, step) for each axis that it is summed over."""


def steps_of(field: Field, label: str) -> Steps:
    """The global indices of ``label`` that this box holds, as steps."""
    return _steps(field.axes, label)


def _steps(axes: Axes, label: str) -> Steps:
    return tuple((a.start, a.extent, a.step) for a in axes if a.label == label)


@lru_cache(maxsize=4096)
def series(steps: Steps) -> Int64:
    """The numbers of ``steps``, the last axis running fastest; read-only, since calls share it."""
    numbers = np.zeros(1, np.int64)
    for start, extent, step in steps:
        numbers = (numbers[:, None] + start + np.arange(extent, dtype=np.int64) * step).ravel()
    numbers.flags.writeable = False
    return numbers


@lru_cache(maxsize=4096)
def match(mine: Steps, theirs: Steps, shift: int) -> tuple[Int64, Int64]:
    """Positions in ``mine`` and in ``theirs``, which are ``shift`` higher, of numbers in both; read-only columns."""
    numbers, others = series(mine), series(theirs) + shift
    first = others.min()
    where = np.full(int(others.max() - first) + 1, -1, np.int64)
    where[others - first] = np.arange(len(others))
    near = np.flatnonzero((numbers >= first) & (numbers < first + len(where)))
    found = where[numbers[near] - first]
    pair = near[found >= 0], found[found >= 0]
    for column in pair:
        column.flags.writeable = False
    return pair


@lru_cache(maxsize=4096)
def classes(mine: Steps, others: tuple[tuple[Steps, int], ...]) -> tuple[tuple[Flags, Flags], ...]:
    """My numbers by which of the others hold them: (those of mine, those of the others that hold them) a class.

    Each of ``others`` is a series and how much higher its numbers are. Both masks are read-only.
    """
    rows = np.zeros((len(others), len(series(mine))), bool)
    for row, (theirs, shift) in zip(rows, others, strict=True):
        row[match(mine, theirs, shift)[0]] = True
    mixed = rows[rows.any(axis=1) & ~rows.all(axis=1)]
    which = (
        np.unique(mixed, axis=1, return_inverse=True)[1].ravel()
        if len(mixed)
        else np.zeros(rows.shape[1], np.int64)
    )
    made = []
    for number in range(int(which.max()) + 1):
        members: Flags = which == number
        holding: Flags = rows[:, int(np.argmax(members))].copy()
        members.flags.writeable = holding.flags.writeable = False
        made.append((members, holding))
    return tuple(made)


def intersect(
    local: Field, remote: Field, *, shift: int = 0, wanted: Mapping[str, Flags] | None = None
) -> Descriptors:
    """Byte runs of the elements that both boxes hold, as offsets into each page, in order of the local side.

    ``shift`` is how much higher the ``token`` indices of the remote side are: blocks of different sizes meet at
    different phases. ``wanted`` restricts labels to a part of the local indices. Both fields must have the same labels.
    """
    part = tuple((label, flags.tobytes()) for label, flags in (wanted or {}).items())
    runs = _runs(local.axes, remote.axes, local.itemsize, shift, part)
    return Descriptors(runs.local + local.offset, runs.remote + remote.offset, runs.length)


@lru_cache(maxsize=256)
def _runs(
    mine: Axes, theirs: Axes, itemsize: int, shift: int, wanted: tuple[tuple[str, bytes], ...]
) -> Descriptors:
    """`intersect` for fields at offset 0, remembered: keys and values differ in nothing else, and replicas in nothing.

    ``wanted`` has one byte for each local index of a label.
    """
    runs = Descriptors(np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, itemsize, np.int64))
    keep = {label: np.frombuffer(flags, np.bool_) for label, flags in wanted}
    labels = dict.fromkeys(axis.label for axis in mine)
    for label in sorted(labels, key=lambda name: min(a.stride for a in mine if a.label == name)):
        by = shift if label == "token" else 0
        at_mine, at_theirs = match(_steps(mine, label), _steps(theirs, label), by)
        if label in keep:
            kept = keep[label][at_mine]
            at_mine, at_theirs = at_mine[kept], at_theirs[kept]
        here, there = _offsets(mine, label)[at_mine], _offsets(theirs, label)[at_theirs]
        runs = coalesce(
            Descriptors(
                (here[:, None] + runs.local).ravel(),
                (there[:, None] + runs.remote).ravel(),
                np.broadcast_to(runs.length, (len(here), len(runs))).ravel(),
            )
        )
    for column in (runs.local, runs.remote, runs.length):
        column.flags.writeable = False
    return runs


def _offsets(axes: Axes, label: str) -> Int64:
    """Bytes from the first element to each that `series` names."""
    return series(tuple((0, a.extent, a.stride) for a in axes if a.label == label))
