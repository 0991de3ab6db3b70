"""A pair of large engines: ranks that are alike in one row, with how many they are, in place of a matrix of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kvctl.cli.numbers import size
from kvctl.views.screen import Column, ScreenPart, number, table
from kvctl.views.topology.document import PairDocument
from kvctl.views.topology.flows import Flow, rank_order

MOST_CELLS = 1024
"""Cells of a matrix that a person still reads, say of 32 by 32 ranks."""
_MOST_RUNS = 3

Heads = tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class _Readers:
    """Local ranks that read alike: the same heads and bytes, from as many ranks each, all of ``sources`` together."""

    heads: Heads
    each: int
    bytes: int
    ranks: list[str] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Senders:
    """Remote ranks that send as much, each to as many readers."""

    readers: int
    bytes: int
    ranks: list[str] = field(default_factory=list)


def is_large(found: Iterable[Flow]) -> bool:
    """Whether a matrix of these flows would be longer than a person reads."""
    ranks = [(flow.local, flow.remote) for flow in found]
    return len({local for local, _ in ranks}) * len({remote for _, remote in ranks}) > MOST_CELLS


def folded(pair: PairDocument, found: Iterable[Flow]) -> ScreenPart:
    """Readers, then senders, those that are alike in one row each."""
    flows = tuple(found)
    what = "A REQUEST" if pair.request else "A BLOCK"
    return [
        table(
            _readers(pair, flows),
            Column("READERS", lambda r: ranges(r.ranks)),
            number("RANKS", lambda r: f"x{len(r.ranks)}"),
            Column("HEADS", lambda r: _heads(r.heads)),
            Column("EACH READS FROM", lambda r: f"{r.each} of {ranges(r.sources)}"),
            number(f"TAKES OF {what}", lambda r: size(r.bytes)),
        ),
        "",
        table(
            _senders(pair, flows),
            Column("SENDERS", lambda s: ranges(s.ranks)),
            number("RANKS", lambda s: f"x{len(s.ranks)}"),
            number("READERS OF EACH", lambda s: s.readers),
            number(f"SENDS OF {what}", lambda s: size(s.bytes)),
        ),
    ]


def _readers(pair: PairDocument, flows: Iterable[Flow]) -> list[_Readers]:
    heads: dict[str, set[tuple[int, int] | None]] = {}
    for read in pair.reads:
        heads.setdefault(read.local_rank, set()).add(read.heads)
    found: dict[object, _Readers] = {}
    for rank, sources in _by(flows, lambda flow: flow.local).items():
        seen = tuple(sorted(heads[rank], key=lambda span: span or (-1, -1)))
        total = sum(flow.bytes for flow in sources)
        readers = found.setdefault((seen, len(sources), total), _Readers(seen, len(sources), total))
        readers.ranks.append(rank)
        readers.sources.update(flow.remote for flow in sources)
    return list(found.values())


def _senders(pair: PairDocument, flows: Iterable[Flow]) -> list[_Senders]:
    found: dict[object, _Senders] = {}
    sent = _by(flows, lambda flow: flow.remote)
    for rank in sorted({*sent, *(pair.request.bytes_by_rank if pair.request else ())}, key=rank_order):
        to = sent.get(rank, [])
        total = sum(flow.bytes for flow in to)
        found.setdefault((len(to), total), _Senders(len(to), total)).ranks.append(rank)
    return list(found.values())


def _by(flows: Iterable[Flow], end: Callable[[Flow], str]) -> Mapping[str, list[Flow]]:
    found: dict[str, list[Flow]] = {}
    for flow in flows:
        found.setdefault(end(flow), []).append(flow)
    return found


def _heads(spans: Heads) -> str | None:
    """``0-3``, or several of these; None where no read is of heads."""
    known = [f"{low}-{high - 1}" if high - low > 1 else f"{low}" for low, high in filter(None, spans)]
    return ", ".join(known[:_MOST_RUNS]) + ", ..." * (len(known) > _MOST_RUNS) if known else None


def ranges(names: Iterable[str]) -> str:
    """``tp0-tp124``, ``tp0.pp1-tp7.pp1``: runs of ranks next to each other, the first few of them."""
    runs: list[list[str]] = []
    last: tuple[int, ...] = ()
    for name in sorted(names, key=rank_order):
        pp, dcp, tp = rank_order(name)
        if last == (pp, dcp, tp - 1):
            runs[-1][1:] = [name]
        else:
            runs.append([name])
        last = pp, dcp, tp
    shown = ", ".join("-".join(run) for run in runs[:_MOST_RUNS])
    return shown if len(runs) <= _MOST_RUNS else f"{shown}, ... {runs[-1][-1]}"
