"""What a decoding worker compares: which of the prefiller's blocks, by whose sums, and what the sums say.

Of a group those blocks of the prefiller's are compared that lie wholly in what was loaded. A block that the range cuts
is left out: its sum holds tokens that were not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import lcm

import numpy as np

from kvd.geometry.model import Field, Group, Layer, WorkerGeometry
from kvd.topology.blocks import BlockList, window_start
from kvd.topology.checksums.sums import (
    ALL_TOKENS,
    Classes,
    Summer,
    TokenSpan,
    Words,
    cells_of,
    classes_of,
    columns,
    layer_sums,
    width,
)
from kvd.topology.descriptors import Int64
from kvd.topology.errors import NotSummable
from kvd.topology.intersect import series, steps_of
from kvd.topology.plan import Plan


@dataclass(frozen=True, slots=True)
class WantedSums:
    """Blocks of one of the prefiller's groups, of whose tokens one class is wanted; of a state one block."""

    group: int
    first: int
    blocks: int
    classes: Classes = ALL_TOKENS
    which: int = 0


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What of one local group was compared: so many layers; ``differs`` says what is not the same, first."""

    group: int
    layers: int
    differs: str = ""


@dataclass(frozen=True, slots=True)
class _SharedPart:
    """A local layer with the workers that it was read from (by position), the prefiller's group, and its tokens."""

    group: Group
    layer: Layer
    sources: tuple[int, ...]
    wanted: WantedSums
    span: TokenSpan


@dataclass(frozen=True)
class Comparison:
    """One load's comparison: whom to ask for what, and what to hold it against.

    ``asks`` are by position of the remote worker.
    """

    remotes: Sequence[WorkerGeometry]
    blocks: Mapping[int, BlockList]
    parts: tuple[_SharedPart, ...] = ()
    asks: Mapping[int, tuple[WantedSums, ...]] = field(default_factory=dict)

    def own_sums(self, summer: Summer) -> dict[str, Words]:
        """The sums of what is in this worker's memory, by layer: one for each cell. Raises `NotSummable`."""
        return {part.layer.name: _own(part, self.blocks[part.group.index], summer) for part in self.parts}

    def compare(
        self, own: Mapping[str, Words], theirs: Mapping[int, Sequence[Words]]
    ) -> tuple[GroupResult, ...]:
        """What the sums say; ``theirs`` are the answers to ``asks``, in their order.

        Raises `NotSummable` where an answer does not have the sums that were asked for.
        """
        tables = {at: self._tables(at, theirs[at]) for at in self.asks}
        found: dict[int, GroupResult] = {}
        for part in self.parts:
            index = part.group.index
            said = found.get(index, GroupResult(index, 0))
            compared, differs = _differing(part, own[part.layer.name], self.remotes, tables)
            found[index] = GroupResult(index, said.layers + compared, said.differs or differs)
        return tuple(found.values())

    def _tables(self, at: int, answer: Sequence[Words]) -> dict[tuple[WantedSums, str], Words]:
        """Of each layer of a remote worker its cells, by what was asked."""
        worker, found = self.remotes[at], {}
        for wanted, sums in zip(self.asks[at], answer, strict=True):
            layers = worker.groups[wanted.group].layers
            if len(sums) != width(layers):
                raise NotSummable(
                    f"group {wanted.group} of {worker.rank} has {width(layers)} cells, and {len(sums)} sums came"
                )
            low = 0
            for layer in layers:
                found[wanted, layer.name] = sums[low : (low := low + width((layer,)))]
        return found


def comparison(
    plan: Plan,
    local: WorkerGeometry,
    remotes: Sequence[WorkerGeometry],
    blocks: Mapping[int, BlockList],
    *,
    tokens: int,
    total: int,
) -> Comparison:
    """What can be compared of a load of ``blocks``, the prefiller having summed ``total`` tokens of which ``tokens``.

    Raises `NotSummable`.
    """
    sources: dict[str, set[int]] = {}
    for read in plan.reads:
        for name in read.layers:
            sources.setdefault(name, set()).add(read.remote)
    parts = []
    asks: dict[int, dict[WantedSums, None]] = {}
    for group in local.groups:
        given = blocks.get(group.index)
        if given is None or not len(given.ids):
            continue
        for layer in group.layers:
            by_group: dict[int, list[int]] = {}
            for at in sorted(sources.get(layer.name, ())):
                by_group.setdefault(remotes[at].layers[layer.name][0].index, []).append(at)
            for index, positions in by_group.items():
                there = remotes[positions[0]].groups[index]
                if (made := _wanted(group, layer, there, given, tokens, total)) is None:
                    continue
                parts.append(_SharedPart(group, layer, tuple(positions), *made))
                for at in positions:
                    asks.setdefault(at, {})[made[0]] = None
    return Comparison(remotes, blocks, tuple(parts), {at: tuple(wanted) for at, wanted in asks.items()})


def _wanted(
    group: Group, layer: Layer, there: Group, given: BlockList, tokens: int, total: int
) -> tuple[WantedSums, TokenSpan] | None:
    """The blocks of the prefiller's that lie wholly in what was loaded of a group; None where none does."""
    if group.kind == "mamba":
        return (
            (WantedSums(there.index, 0, 1), TokenSpan(0, 1))
            if tokens == total and len(given.ids) == 1
            else None
        )
    begin, size = given.first * group.block_size, there.block_size
    if group.window is not None:
        begin = max(begin, window_start(group.kind, group.window, tokens))
    first = -(-begin // size)
    last = -(-total // size) if tokens >= total else tokens // size
    if first >= last:
        return None
    classes, which = _classes(layer, group)
    return WantedSums(there.index, first, last - first, classes, which), TokenSpan(
        first * size, min(last * size, total)
    )


def _classes(layer: Layer, group: Group) -> tuple[Classes, int]:
    found = {classes_of(fld, group.block_size) for fld in layer.page.fields if fld.axes_of("token")}
    if len(found) > 1:
        raise NotSummable(f"fields of layer {layer.name} hold different tokens")
    return found.pop() if found else (ALL_TOKENS, 0)


def _own(part: _SharedPart, blocks: BlockList, summer: Summer) -> Words:
    """A layer's cells; only blocks with tokens that count are read."""
    if part.group.kind == "mamba":
        ids, firsts = blocks.ids, np.zeros(len(blocks.ids), np.int64)
    else:
        size = part.group.block_size
        low, high = part.span.begin // size - blocks.first, -(-part.span.end // size) - blocks.first
        ids = blocks.ids[max(0, low) : high]
        firsts = (blocks.first + max(0, low) + np.arange(len(ids), dtype=np.int64)) * size
    sums: Words = layer_sums(part.layer, summer, firsts=firsts, ids=ids, span=part.span).sum(axis=(0, 1))
    return sums


def _differing(
    part: _SharedPart,
    own: Words,
    remotes: Sequence[WorkerGeometry],
    tables: Mapping[int, Mapping[tuple[WantedSums, str], Words]],
) -> tuple[bool, str]:
    """Whether anything of a layer was compared, and the first field and cell of it that differs."""
    name, compared = part.layer.name, False
    for fld, low, high in columns(part.layer.page):
        mine, here = cells_of(fld), own[low:high]
        there, known = np.zeros(len(mine), np.uint64), np.zeros(len(mine), bool)
        held = []
        for at in part.sources:
            layer = remotes[at].layers[name][1]
            other, first, last = next(c for c in columns(layer.page) if c[0].name == fld.name)
            size = remotes[at].groups[part.wanted.group].block_size
            held.append((other, size, tables[at][part.wanted, name][first:last]))
        for number, cells, places in _sources(
            fld, part.wanted, tuple((other, size) for other, size, _ in held)
        ):
            known[cells] = True
            there[cells] += held[number][2][places]
        compared = compared or bool(known.any())
        wrong = np.flatnonzero(known & (there != here))
        if len(wrong):
            cell = int(wrong[0])
            where = f" {mine.label} {mine.first + cell}" if mine.width == 1 and mine.label else ""
            sums = f"{int(there[cell]):#018x} there, {int(here[cell]):#018x} here"
            return True, f"layer {name} {fld.name}{where}: {sums}"
    return compared, ""


@lru_cache(maxsize=1024)
def _sources(
    mine: Field, wanted: WantedSums, others: tuple[tuple[Field, int], ...]
) -> tuple[tuple[int, Int64, Int64], ...]:
    """Which of the remote fields make up cells of a local one: its number, cells here, and the same cells there.

    Remote fields come with the size of their blocks. Replicas count once; cells that our share cuts are left out, and
    those that the remote fields do not make up.
    """
    cells = cells_of(mine)
    found: dict[int, list[tuple[int, int]]] = {}
    wanted_tokens, held = _tokens(wanted, others)
    for i in range(len(cells)):
        if cells.label and cells.members[i] < cells.width:
            continue
        parts: dict[tuple[int, frozenset[int]], tuple[int, int]] = {}
        covered = 0
        for number, (other, _) in enumerate(others):
            theirs = cells_of(other)
            place = cells.first + i - theirs.first
            if not 0 <= place < len(theirs) or not held[number]:
                continue
            low = int(series(steps_of(other, theirs.label))[theirs.starts[place]]) if theirs.label else 0
            if (low, held[number]) not in parts:
                parts[low, held[number]] = (number, place)
                covered += theirs.members[place] * len(held[number])
        if covered == cells.members[i] * wanted_tokens:
            for number, place in parts.values():
                found.setdefault(number, []).append((i, place))
    columns_of = {number: np.array(pairs, np.int64).T for number, pairs in found.items()}
    return tuple((number, here, there) for number, (here, there) in columns_of.items())


def _tokens(wanted: WantedSums, others: tuple[tuple[Field, int], ...]) -> tuple[int, list[frozenset[int]]]:
    """How many tokens of each period are wanted, and which of them each of the remote fields holds."""
    classes = [classes_of(other, size) for other, size in others]
    numbers = np.arange(lcm(*(c.run * c.period for c in (wanted.classes, *(c for c, _ in classes)))))
    asked = numbers[wanted.classes.of(numbers) == wanted.which]
    return len(asked), [frozenset(asked[c.of(asked) == which].tolist()) for c, which in classes]
