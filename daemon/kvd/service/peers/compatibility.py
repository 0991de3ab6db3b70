"""Verdicts: whether a local engine can read from a peer, found once for each two shapes of engine."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable

from kvd.geometry.errors import GeometryError
from kvd.geometry.model import Axis, EngineGeometry, Field, Group, Layer, Page, Region, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.service.engines.local_engine import LocalEngine
from kvd.topology.findings import ONE_ID
from kvd.wire.identity import EngineCard
from kvd.wire.reply import RefusalFactor

Workers = tuple[WorkerGeometry, ...]
Compare = Callable[[EngineCard, Workers, EngineCard], tuple[RefusalFactor, ...]]
Pair = tuple[str, str]
KEPT = 4096
"""Most pairs of shapes whose verdict is remembered."""


class CompatibilityCache:
    """The factors that fail, by the shapes of two engines: an engine's replicas, and its next start, are alike."""

    def __init__(self, compare: Compare, counters: Counter[str]) -> None:
        self._compare = compare
        self._counters = counters
        self._found: OrderedDict[Pair, tuple[RefusalFactor, ...]] = OrderedDict()
        self._underway: dict[Pair, asyncio.Task[tuple[RefusalFactor, ...]]] = {}

    async def find(
        self, local: LocalEngine, peer: EngineCard, shape: str
    ) -> tuple[bool, tuple[RefusalFactor, ...]]:
        """Whether it was known, and the factors that fail between ``local`` and ``peer``: none where they fit.

        ``shape`` is the peer's; without one its generation takes its place. However many ask at the same time, the two
        are compared once.
        """
        pair = local.shape or local.generation, shape or peer.generation
        if (known := self._found.get(pair)) is not None:
            return True, known
        task = self._underway.get(pair)
        if task is None:
            self._counters["handshakes.comparisons"] += 1
            task = asyncio.get_running_loop().create_task(self._find(local, peer))
            self._underway[pair] = task
            task.add_done_callback(lambda done: self._done(pair, done))
        # Shielded: one asker that is given up must not end it for the others.
        return False, await asyncio.shield(task)

    async def _find(self, local: LocalEngine, peer: EngineCard) -> tuple[RefusalFactor, ...]:
        # Planning a large pair takes tens of milliseconds, which heartbeats must not wait for.
        factors = await asyncio.to_thread(self._compare, local.card(), local.geometries, peer)
        return tuple(factor for factor in factors if not factor.ok)

    def _done(self, pair: Pair, done: asyncio.Task[tuple[RefusalFactor, ...]]) -> None:
        del self._underway[pair]
        if done.cancelled() or done.exception() is not None:
            return
        self._found[pair] = done.result()
        while len(self._found) > KEPT:
            self._found.popitem(last=False)


def compare_cards(local: EngineCard, workers: Workers, peer: EngineCard) -> tuple[RefusalFactor, ...]:
    """Factor by factor, whether ``local`` can read from ``peer``; a card that cannot be read is a factor that fails.

    ``workers`` are the geometries of ``local``, read when they were registered; where they are not given its card is
    read again.
    """
    # numpy comes with them: kvd serves first and imports them then (`kvd.service.run`), off the loop.
    from kvd.client.cards import engine_geometry
    from kvd.topology import compat

    try:
        factors = compat.compare(engine_geometry(local, workers), engine_geometry(peer))
    except GeometryError as error:
        return (RefusalFactor("geometry", "readable", f"not readable: {error}", ok=False),)
    return tuple(RefusalFactor(f.name, f.local, f.remote, f.ok, f.note) for f in factors)


def next_step(bad: tuple[RefusalFactor, ...], local: str, remote: str) -> str:
    """What to do about the factors that fail between two engines, by their ids."""
    compared = f"`kvctl describe-topology {local} {remote}` compares the two factor by factor"
    if {"model", "config", "weights"}.isdisjoint(factor.name for factor in bad):
        return compared
    return f"load the same checkpoint on both sides, or {ONE_ID} if their KV may be exchanged all the same; {compared}"


def rehearse() -> None:
    """Import what comparing takes and compare an engine of one layer with itself: the first time takes milliseconds."""
    from kvd.client import cards  # noqa: F401 - imported for `compare_cards`
    from kvd.topology import compat

    axes = (Axis("head", 0, 1, 1, 4), Axis("token", 0, 1, 1, 4))
    page = Page(4, (Field("k", "float32", 4, 0, axes, (("head", 1), ("token", 1))),))
    group = Group(0, "full", 1, (Layer("0", page, region=0, offset=0, stride=4),))
    worker = WorkerGeometry(Rank(), 1, (Region(1, 4),), (group,))
    engine = EngineGeometry("rehearsal", "", "none", 1, 1, 1, (worker,))
    compat.compare(engine, engine)
