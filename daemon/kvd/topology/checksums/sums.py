"""Checksums of KV that do not depend on who holds it how: two engines of any TP, DCP, PP, block size and layout agree.

A field's *row* is what it holds of one token and one head (or channel, or neither): always whole on a worker, since
nothing else is sharded. Its bits are taken as 64-bit words along the last of its axes; a row's sum is that of word
times an odd weight, mod 2^64. Rows are mixed with their token and head and added up by *cell*: a head, or some
channels, or everything, of the tokens of one block. Sums of cells add up over blocks, and over the workers that hold
parts of them, in any order.

One flipped bit always shows. Rows that are swapped, shifted or overwritten show but for one case in about 2^63.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import gcd, lcm, prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvd.geometry.model import Field, Layer, Page
from kvd.topology.descriptors import Flags, Int64
from kvd.topology.errors import NotSummable
from kvd.topology.intersect import series, steps_of

Words = NDArray[np.uint64]

WORD = 8
"""Bytes of a word."""
FEW_CELLS = 128
"""Up to so many heads or channels each are a cell of their own; of more there are as many as divide `MOST_CELLS`."""
MOST_CELLS = 6720
"""2^6 * 3 * 5 * 7: cells of many channels then end where the shares of 2, 3, 4, 5, 6, 7, 8 ... ranks do."""
CHUNK = 4 << 20
"""Bytes that are read at a time: what is computed of them is less, and what is gathered of them as much."""
LEAST_RUN = 16 << 10
"""Bytes of neighbouring pages from which on they are read where they stand; less is gathered first."""
MIX = 0xD6E8FEB86659FD93
"""A row's sum is mixed with its place by this, between two shifts by 32 bits."""
_WORD, _PLACE, _TOKEN = 0x5EED, 0xCE11, 0x70CE
MOST_CLASSES = 64
"""Classes of tokens that sums are kept apart for at most."""


@dataclass(frozen=True, slots=True)
class FieldCells:
    """The cells of one field on one worker: numbers ``first`` and following, of ``width`` heads or channels each.

    ``starts`` are the positions in the box at which each begins, ``members`` how many each has here; a cell that a
    share cuts has fewer than ``width``. ``label`` is empty where nothing is sharded.
    """

    label: str
    width: int
    first: int
    starts: tuple[int, ...]
    members: tuple[int, ...]

    def __len__(self) -> int:
        """How many there are."""
        return len(self.starts)


@lru_cache(maxsize=4096)
def cells_of(fld: Field) -> FieldCells:
    """The cells of a field on a worker. Raises `NotSummable` where its heads or channels have gaps."""
    label = _cell_label(fld)
    if not label:
        return FieldCells("", 1, 0, (0,), (1,))
    total = dict(fld.shape)[label]
    width = 1 if total <= FEW_CELLS else total // gcd(total, MOST_CELLS)
    numbers = series(steps_of(fld, label))
    if len(numbers) != numbers[-1] - numbers[0] + 1 or (np.diff(numbers) != 1).any():
        raise NotSummable(
            f"field {fld.name} holds {label} {numbers[0]}..{numbers[-1]} in {len(numbers)} pieces"
        )
    of_each = numbers // width
    starts = np.flatnonzero(np.concatenate(([True], of_each[1:] != of_each[:-1])))
    members = np.diff(np.concatenate((starts, [len(numbers)])))
    return FieldCells(label, width, int(of_each[0]), tuple(starts.tolist()), tuple(members.tolist()))


@lru_cache(maxsize=4096)
def columns(page: Page) -> tuple[tuple[Field, int, int], ...]:
    """The fields of a page with the first and one past the last column that each has in a table of sums."""
    found, at = [], 0
    for fld in page.fields:
        found.append((fld, at, at + len(cells_of(fld))))
        at = found[-1][2]
    return tuple(found)


def width(layers: Sequence[Layer]) -> int:
    """Columns of a table of sums of these layers, one after the other."""
    return sum(columns(layer.page)[-1][2] for layer in layers)


@dataclass(frozen=True, slots=True)
class Classes:
    """Tokens by the rank that holds them under context parallelism: token ``t`` is of class ``t // run % period``."""

    run: int = 1
    period: int = 1

    def of(self, tokens: Int64) -> Int64:
        """The class of each token."""
        found: Int64 = tokens // self.run % self.period
        return found

    def parts(self, other: Classes, which: int) -> list[int] | None:
        """Which of these classes make up class ``which`` of ``other``; None where some are only partly in it."""
        if other.run % self.run or (self.run * self.period) % (other.run * other.period):
            return None
        starts = np.arange(self.period, dtype=np.int64) * self.run
        return [int(mine) for mine in np.flatnonzero(other.of(starts) == which)]

    def finer(self, other: Classes) -> Classes:
        """Classes that make up these as well as the others."""
        run = gcd(self.run, other.run)
        return Classes(run, lcm(self.run * self.period, other.run * other.period) // run)


ALL_TOKENS = Classes()
"""No tokens are told apart."""


@lru_cache(maxsize=4096)
def classes_of(fld: Field, block_size: int) -> tuple[Classes, int]:
    """Which tokens of a block of ``block_size`` a field holds: classes, and the one that is here.

    Raises `NotSummable` where they are no class.
    """
    tokens = np.sort(series(steps_of(fld, "token")))
    if not fld.axes_of("token") or len(tokens) == block_size:
        return ALL_TOKENS, 0
    breaks = np.flatnonzero(np.diff(tokens) != 1)
    run = int(breaks[0]) + 1 if len(breaks) else len(tokens)
    found = Classes(run, block_size // len(tokens))
    which = int(found.of(tokens[:1])[0])
    every = np.arange(block_size, dtype=np.int64)
    if block_size % len(tokens) or every[found.of(every) == which].tolist() != tokens.tolist():
        raise NotSummable(f"field {fld.name} holds {len(tokens)} of {block_size} tokens, in no regular order")
    return found, which


# --- how a field's elements are read ---


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the rows of a field are read from a page, whatever does it.

    Units of ``unit`` bytes stand ``offset`` bytes into the page with ``extents`` and ``strides`` (bytes). Their order
    is heads or channels, tokens, the rest of a row. The first ``rows`` axes are not part of a row. ``weights`` has one
    for each unit of a row, ``places`` one for each head or channel, of which those from ``cells[i]`` on are a cell's.
    ``tokens`` are those of a block that are held.
    """

    unit: int
    offset: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    rows: int
    weights: Words
    places: Words
    cells: tuple[int, ...]
    tokens: Int64

    @property
    def reach(self) -> int:
        """Bytes from the first unit of a page to the end of the last."""
        return sum((n - 1) * s for n, s in zip(self.extents, self.strides, strict=True)) + self.unit

    @property
    def page_bytes(self) -> int:
        """Bytes of one page that are read."""
        return self.unit * prod(self.extents)


@lru_cache(maxsize=4096)
def recipe(fld: Field) -> Recipe:
    """The recipe of a field. Raises `NotSummable`."""
    size = fld.itemsize
    if size not in (1, 2, 4, 8):
        raise NotSummable(f"field {fld.name} has elements of {size} bytes; sums are of 1, 2, 4 or 8")
    label = _cell_label(fld)
    rest = [name for name, _ in fld.shape if name not in (label, "token")]
    rest_axes = [axis for name in rest for axis in fld.axes_of(name)]
    held = [len(series(steps_of(fld, name))) for name in rest]
    if held != [dict(fld.shape)[name] for name in rest]:
        raise NotSummable(f"field {fld.name} holds only a part of {', '.join(rest)}")
    index = _row_index(fld, rest)
    along = dict(fld.shape)[rest[-1]] if rest else 1
    each = WORD // size
    lead, at = index // along, index % along
    number = lead * -(-along // each) + at // each
    weights = _odd(number, _WORD) << (at % each * 8 * size).astype(np.uint64)
    axes = [*fld.axes_of(label), *fld.axes_of("token"), *rest_axes]
    extents, strides = [a.extent for a in axes], [a.stride for a in axes]
    words = bool(rest_axes) and rest_axes[-1].stride == size and rest_axes[-1].extent % each == 0
    if words and len(fld.axes_of(rest[-1])) == 1:
        extents[-1] //= each
        strides[-1] = WORD
        weights, size = weights[::each], WORD
    weights = np.ascontiguousarray(weights)
    places = _odd(series(steps_of(fld, label)) if label else np.zeros(1, np.int64), _PLACE)
    for shared in (weights, places):
        shared.flags.writeable = False
    return Recipe(
        unit=size,
        offset=fld.offset,
        extents=tuple(extents),
        strides=tuple(strides),
        rows=len(axes) - len(rest_axes),
        weights=weights,
        places=places,
        cells=cells_of(fld).starts,
        tokens=series(steps_of(fld, "token")) if fld.axes_of("token") else np.zeros(1, np.int64),
    )


class Summer(Protocol):
    """What adds up pages where they stand: `InMemory` with numpy, others on a device."""

    @property
    def chunk(self) -> int:
        """Bytes that it is best given at a time."""

    def sums(self, layer: Layer, how: Recipe, ids: Int64, tokens: Words, counted: Flags) -> Words:
        """Sums of a field of a layer's pages ``ids``, shape (blocks, classes, cells).

        ``tokens`` are the weights of the tokens, shape (blocks, tokens); ``counted`` says which are of which class,
        shape (classes, blocks, tokens).
        """


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens ``begin`` to ``end`` of a prompt. A state counts as one token, of the number that its page begins with."""

    begin: int
    end: int


def layer_sums(
    layer: Layer, summer: Summer, *, firsts: Int64, ids: Int64, span: TokenSpan, classes: Classes = ALL_TOKENS
) -> Words:
    """Sums of a layer's pages, shape (blocks, classes, cells): page ``ids[i]`` begins with token ``firsts[i]``.

    Tokens outside ``span`` do not count. Raises `NotSummable`.
    """
    made = np.zeros((len(ids), classes.period, columns(layer.page)[-1][2]), np.uint64)
    numbers = np.arange(classes.period)[:, None, None]
    for fld, low, high in columns(layer.page):
        how = recipe(fld)
        step = max(1, summer.chunk // how.page_bytes)
        for at in range(0, len(ids), step):
            part = slice(at, at + step)
            tokens = firsts[part, None] + how.tokens
            counted = (tokens >= span.begin) & (tokens < span.end) & (classes.of(tokens) == numbers)
            made[part, :, low:high] = summer.sums(layer, how, ids[part], _odd(tokens, _TOKEN), counted)
    return made


@dataclass(frozen=True, slots=True)
class InMemory:
    """Sums of memory that numpy can read: the bytes of each of a worker's regions."""

    regions: Sequence[NDArray[np.uint8]]
    chunk: int = CHUNK

    def sums(self, layer: Layer, how: Recipe, ids: Int64, tokens: Words, counted: Flags) -> Words:
        """As `Summer` says."""
        mixed = self._rows(layer, how, ids)
        mixed += tokens[:, None, :] * how.places[:, None]
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(MIX)
        mixed ^= mixed >> np.uint64(32)
        made = [
            np.add.reduceat(
                (mixed if every.all() else mixed * every[:, None, :]).sum(axis=2), how.cells, axis=1
            )
            for every in counted
        ]
        return np.stack(made, axis=1)

    def _rows(self, layer: Layer, how: Recipe, ids: Int64) -> Words:
        """Sums of rows, shape (blocks, heads or channels, tokens)."""
        region, at = self.regions[layer.region], layer.offset + how.offset
        blocks = (len(region) - at - how.reach) // layer.stride + 1
        pages: NDArray[np.generic] = np.ndarray(
            (blocks, *how.extents), f"<u{how.unit}", region.data, at, (layer.stride, *how.strides)
        )
        breaks = np.flatnonzero(np.diff(ids) != 1) + 1
        if len(breaks) and how.page_bytes * len(ids) < LEAST_RUN * (len(breaks) + 1):
            return _row_sums(pages[ids], how)
        bounds = [0, *breaks.tolist(), len(ids)]
        runs = [slice(int(ids[low]), int(ids[low]) + high - low) for low, high in pairwise(bounds)]
        return np.concatenate([_row_sums(pages[run], how) for run in runs])


def _row_sums(pages: NDArray[np.generic], how: Recipe) -> Words:
    if len(how.extents) != how.rows + 1:
        pages = pages.reshape(*pages.shape[: 1 + how.rows], len(how.weights))
    words: Words = pages.astype(np.uint64, copy=False)
    sums: Words = np.einsum("...w,w->...", words, how.weights)
    return sums.reshape(len(pages), len(how.places), len(how.tokens))


def _row_index(fld: Field, rest: Sequence[str]) -> Int64:
    """Number of each element of a row, in the order of ``rest`` with the last running fastest, as the axes give it."""
    index = np.zeros(1, np.int64)
    for name in rest:
        index = (index[:, None] * dict(fld.shape)[name] + series(steps_of(fld, name))).ravel()
    return index


def _cell_label(fld: Field) -> str:
    return next((label for label in ("head", "channel") if fld.axes_of(label)), "")


def _odd(numbers: Int64, salt: int) -> Words:
    """An odd weight for each number: the finaliser of splitmix64."""
    value = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31)) | np.uint64(1)
