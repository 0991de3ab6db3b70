"""How many blocks of both engines the memory allows, and which sizes of requests that leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvctl.bench.cases import blocks_needed, whole_tokens
from kvctl.bench.memory import size_of
from kvctl.bench.pair import PairScene, scene
from kvctl.cli.numbers import size
from kvctl.errors import CheckFailed
from kvd.geometry.model import EngineGeometry, WorkerGeometry
from kvd.topology.compat import compare

SPARE = 1.5
"""Blocks taken for each that is needed, where memory allows, so that scattered blocks have gaps between them."""


@dataclass(frozen=True)
class Sized:
    """A scene, the sizes (tokens, requests at a time) that fit in it, and what was left out."""

    scene: PairScene
    sizes: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]


def sized(
    local: EngineGeometry,
    remote: EngineGeometry,
    tokens: Sequence[int],
    concurrency: Sequence[int],
    memory: int,
) -> Sized:
    """The largest sizes asked for that fit in ``memory`` bytes of both processes together.

    Raises `CheckFailed` where the engines do not fit each other, or not even the smallest size fits.
    """
    bad = [factor for factor in compare(local, remote) if not factor.ok]
    if bad:
        what = f"{bad[0].name} {bad[0].local} here and {bad[0].remote} there ({bad[0].note})"
        raise CheckFailed(
            f"{local.engine_id} cannot read from {remote.engine_id}: {what}",
            "see kvctl diff",
            "COMPAT_MISMATCH",
        )
    wanted = dict.fromkeys((whole_tokens((local, remote), t), count) for t in tokens for count in concurrency)
    whole = scene(local, remote, (local.workers[0].num_blocks, remote.workers[0].num_blocks))
    sides = ([whole.reader], [whole.sources[at] for at in whole.plan.sources])
    fits, notes = [], []
    for length, count in wanted:
        why = _too_large(sides, length, count, memory)
        if why:
            notes.append(f"{length} tokens, {count} at a time: {why}")
        else:
            fits.append((length, count))
    if not fits:
        raise CheckFailed(
            f"nothing fits: {notes[0]}",
            "give more --memory, fewer --tokens, or engines with more num_blocks",
        )
    largest = [max(blocks_needed(side[0], length, count) for length, count in fits) for side in sides]
    roomy = int(SPARE * largest[0]), int(SPARE * largest[1])
    found = scene(local, remote, roomy)
    if found.bytes > memory:
        found = scene(local, remote, (largest[0], largest[1]))
    return Sized(found, tuple(fits), tuple(notes))


def _too_large(
    sides: tuple[list[WorkerGeometry], list[WorkerGeometry]], tokens: int, count: int, memory: int
) -> str:
    """Why so many requests of so many tokens do not fit; empty where they do."""
    taken = 0
    for workers in sides:
        needed = blocks_needed(workers[0], tokens, count)
        if needed > workers[0].num_blocks:
            return f"takes {needed} blocks of an engine that has {workers[0].num_blocks}"
        taken += sum(size_of(worker) * needed // worker.num_blocks for worker in workers)
    if taken > memory:
        return f"takes {size(taken)} of memory, and --memory allows {size(memory)}"
    return ""
