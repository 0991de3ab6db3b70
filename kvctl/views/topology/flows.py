"""What flows between the ranks of a pair: one number for each (local, remote), for the matrix and the drawings."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from kvctl.cli.numbers import rate, size, span
from kvctl.views.screen import sizes
from kvctl.views.topology.document import PairDocument, RequestDocument
from kvd.geometry.rank import Rank
from kvd.topology.describe import EngineSummary, ReadSummary


class Flow(NamedTuple):
    """Bytes that ``local`` takes from ``remote``: of a request where its cost is known, else of a block of each group.

    ``groups`` are those that it takes anything of.
    """

    local: str
    remote: str
    bytes: int
    groups: tuple[int, ...]


def flows(pair: PairDocument) -> tuple[Flow, ...]:
    """Every flow, in the order of the ranks."""
    # Large engines have tens of thousands of pairs of ranks, and few sets of groups.
    groups: dict[tuple[str, str], tuple[int, ...]] = {}
    for read in pair.reads:
        key = read.local_rank, read.remote_rank
        groups[key] = _with(groups.get(key, ()), read.group)
    known = _of_a_request(pair.request) if pair.request else _of_a_block(pair.reads)
    return tuple(
        Flow(local, remote, known.get((local, remote), 0), groups[local, remote])
        for local, remote in sorted(groups, key=lambda key: (rank_order(key[0]), rank_order(key[1])))
    )


@lru_cache(1 << 10)
def _with(groups: tuple[int, ...], group: int) -> tuple[int, ...]:
    return tuple(sorted({*groups, group}))


def _of_a_request(request: RequestDocument) -> dict[tuple[str, str], int]:
    return {(link.local_rank, link.remote_rank): link.bytes for link in request.links}


def _of_a_block(reads: Iterable[ReadSummary]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for read in reads:
        key = read.local_rank, read.remote_rank
        found[key] = found.get(key, 0) + read.bytes_per_block * read.layers
    return found


def partial_groups(pair: PairDocument, flow: Flow) -> str:
    """``g0g2`` where a flow takes part in some groups only; empty where it is all of them."""
    if len(flow.groups) == len({read.group for read in pair.reads}):
        return ""
    return "".join(f"g{group}" for group in flow.groups)


def label(pair: PairDocument, flow: Flow) -> str:
    """``1.50 MiB g0g2``: the bytes of a flow, and its groups where it takes part in some only."""
    return f"{size(flow.bytes)} {partial_groups(pair, flow)}".rstrip()


def least_time(request: RequestDocument) -> str:
    """The least time that a request takes, and at what bandwidth; empty where none was given."""
    if request.seconds is None:
        return ""
    return f"{span(request.seconds)} at {rate(request.bandwidth)} a rank"


@lru_cache(1 << 16)
def rank_order(name: str) -> tuple[int, ...]:
    """Ranks in the order of their numbers: tp10 after tp9, all of one pp stage together."""
    parts = dict.fromkeys(("pp", "dcp", "tp"), 0)
    for part in name.split("."):
        label = part.rstrip("0123456789")
        parts[label] = int(part[len(label) :] or 0)
    return tuple(parts.values())


def rank_names(engine: EngineSummary) -> tuple[str, ...]:
    """The names of all ranks of an engine, by its sizes; context-parallel ranks are TP ranks in turn."""
    return tuple(
        str(Rank(tp, pp, tp % (engine.dcp or 1))) for pp in range(engine.pp) for tp in range(engine.tp)
    )


def shape(engine: EngineSummary) -> str:
    """``tp4 pp2, blocks of 16``."""
    blocks = " and ".join(str(n) for n in dict.fromkeys(engine.block_sizes) if n)
    split = sizes(tp=engine.tp, pp=engine.pp, dcp=engine.dcp) if engine.tp else "tp unknown"
    return split + (f", blocks of {blocks}" if blocks else "")
