"""The engines that keep a core busy though nobody asks them stand still while others are measured.

Each of stock NIXL's does. No deployment has such engines beside another's: whoever is measured beside them may share a
core with one, and takes up to twice as long for a step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping

from benchmarks.gpu.fleet import STOCK, Pair
from kvctl.processes.tree import descendants
from tests.support.engine_pids import engine_pids, title
from tests.support.halting import go_on, halt, halted

Busy = Mapping[str, Collection[int]]
"""By a pair's name the processes that stand still while others are measured; of others there is nothing."""


def busy_pairs(pairs: Iterable[Pair]) -> Busy:
    """Those of stock connectors."""
    return {
        pair.spec.name: [pid for engine in pair.engines for pid in engine_pids(engine).executing]
        for pair in pairs
        if pair.spec.way in STOCK
    }


def cores_below(pids: Iterable[int]) -> list[int]:
    """The engines that these servers have started, each with one worker."""
    return [
        below for pid in pids for below in descendants(pid) if title(below).startswith("VLLM::EngineCore")
    ]


def standing_still(busy: Busy) -> contextlib.AbstractContextManager[None]:
    """They stand still within, but where they are `going`."""
    return halted(itertools.chain(*busy.values()))


@contextlib.contextmanager
def going(busy: Busy, name: str) -> Iterator[None]:
    """A pair is measured within: its processes go on meanwhile."""
    pids = busy.get(name, ())
    go_on(*pids)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # one that has died stands still
                halt(pid)
