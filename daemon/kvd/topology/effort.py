"""What comparing two engines would take, counted before it is begun: a card may describe what no machine can plan."""

from __future__ import annotations

from math import lcm

from kvd.geometry.model import EngineGeometry, Page
from kvd.topology.compat import groups_of, kinds
from kvd.topology.errors import TooMuchToCompare

MAX_LAYERS = 1 << 22
"""Most layers of all workers of an engine together; 4,096 workers of 80 layers have 327,680."""
MAX_ELEMENTS = 1 << 24
"""Most elements of all distinct pages of an engine together, which planning lists. Real pages have less than a million,
and workers that split a tensor share its elements out."""
MAX_OVERLAPS = 1 << 22
"""Most pairs of blocks of unlike sizes that meet within one period, over all remote workers and pairs of groups."""


def refuse_large(local: EngineGeometry, remote: EngineGeometry) -> None:
    """Raise `TooMuchToCompare` where comparing the two takes more than any real pair; names figure and limit."""
    for engine in (local, remote):
        who = f"engine {engine.engine_id}"
        layers = sum(len(group.layers) for w in engine.workers for group in w.groups)
        _within(layers, MAX_LAYERS, f"{who}: layers of all its workers")
        pages: set[Page] = {layer.page for w in kinds(engine) for _, layer in w.layers.values()}
        elements = sum(field.elements for page in pages for field in page.fields)
        _within(elements, MAX_ELEMENTS, f"{who}: elements in its pages")
    overlaps = 0
    for mine in groups_of(local).values():
        for theirs in groups_of(remote).values():
            if "mamba" not in (mine.kind, theirs.kind):
                period = lcm(mine.block_size, theirs.block_size)
                overlaps += (period // mine.block_size + period // theirs.block_size) * len(remote.workers)
    what = f"blocks of {local.engine_id} and {remote.engine_id} that meet in a period"
    _within(overlaps, MAX_OVERLAPS, what)


def _within(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise TooMuchToCompare(f"{what}: {count}; at most {limit} are compared")
