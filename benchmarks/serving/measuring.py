"""Rounds of cells, the pairs of a stage in turns within each; a line of results for each request."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.gpu.asking import Legs, Mode, legs_of
from benchmarks.gpu.correctness import about
from benchmarks.gpu.fleet import STOCK, Fleet, Pair
from benchmarks.gpu.losing import tried
from benchmarks.gpu.timing import warm
from benchmarks.serving.cells import PlannedPrompt, ServingCell, arrivals
from benchmarks.serving.halting import busy_pairs, going, standing_still
from benchmarks.serving.in_host import FACTS
from benchmarks.serving.ledger import loads_since, newest
from benchmarks.serving.router import RoutedPrompt, run_cell
from benchmarks.serving.same_cores import place

FACTS_SECONDS = 10.0
CORE = ("queued", "scheduled", "first")


def measure(
    fleet: Fleet,
    running: Sequence[Pair],
    cells: Sequence[ServingCell],
    modes: Callable[[Pair], Sequence[Mode]],
    rounds: int,
) -> dict[str, list[str]]:
    """All cells by all pairs in each of their modes, ``rounds`` times, and a round before them that does not count."""
    lengths = sorted({tokens for cell in cells for tokens, _ in cell.lengths})
    warm(fleet, running, lengths)
    turns: list[tuple[Pair, Mode]] = [(pair, mode) for pair in running for mode in modes(pair)]
    for pair in running:
        tried(fleet, pair, "facts", functools.partial(_facts, fleet, pair))
    # Many at once: some kernels are compiled when a batch is first of their kind, which takes a second.
    many = 2 * len(lengths) + (2 if fleet.device == "cpu" else 12)
    first = ServingCell(name="warm", lengths=tuple((n, 1.0) for n in lengths), rate=1000.0, count=many)
    for pair, mode in turns:
        for number in range(2):
            _do(fleet, pair, mode, first, number, note="warm")
    place(fleet.running)
    busy = busy_pairs(fleet.running)
    with standing_still(busy):
        for number in range(rounds):
            for cell in cells:
                for pair, mode in (*turns[number % len(turns) :], *turns[: number % len(turns)]):
                    with going(busy, pair.spec.name):
                        _do(fleet, pair, mode, cell, number)
            fleet.report.note("round", number=number)
            fleet.report.say(f"round {number + 1} of {rounds} is over")
    return {}


def _facts(fleet: Fleet, pair: Pair) -> None:
    found = [engine.call(FACTS).result(FACTS_SECONDS) for engine in pair.engines]
    fleet.report.note("facts", pair=pair.spec.name, engines=found)
    fleet.report.say(f"{pair.spec.name}: {found[-1]}")


def _do(
    fleet: Fleet, pair: Pair, mode: Mode, cell: ServingCell, number: int, note: str | None = None
) -> None:
    work = functools.partial(_cell, fleet, pair, mode, cell, number, note)
    tried(fleet, pair, f"{mode} {cell.name} {number}", work)


def _cell(fleet: Fleet, pair: Pair, mode: Mode, cell: ServingCell, number: int, note: str | None) -> None:
    legs: Callable[[], Legs] | None = None if pair.spec.way == "none" else legs_of(pair, mode)
    ours = pair.spec.way not in (*STOCK, "none")
    after = newest(pair) if ours else 0
    planned: Sequence[PlannedPrompt] = arrivals(cell, number)
    asked = run_cell(pair, legs, cell, planned)
    names = {one.handed_over for one in asked if one.handed_over and not one.error}
    loads = loads_since(pair, after, names) if ours else {}
    said = about(pair, mode, cell.longest)
    for one in asked:
        fleet.report.note(
            "served",
            **{**said, "tokens": one.planned.tokens},
            pair=pair.spec.name,
            cell=cell.name,
            rate=cell.rate,
            round=number,
            note=note,
            **line_of(one, loads.get(one.handed_over)),
        )


def line_of(one: RoutedPrompt, load: Mapping[str, Any] | None) -> dict[str, Any]:
    """A request as it is written down: seconds after the router sent it, and ``sent`` itself on the host's clock."""

    def after(at: float) -> float | None:
        return round(at - one.sent, 6) if at else None

    found: dict[str, Any] = {"sent": round(one.sent, 6), "error": one.error[-1000:]}
    if one.prefilled is not None:
        found["prefill"] = {name: after(one.prefilled[name]) for name in ("got", *CORE)}
        found["prefill"]["answered"] = after(one.prefilled["tokens"][-1][0])
        found["handed"] = after(one.handed)
    if one.decoded is not None:
        tokens = one.decoded["tokens"]
        found["decode"] = {name: after(one.decoded[name]) for name in ("got", *CORE)}
        found["decode"] |= {"token": after(tokens[0][0]), "last": after(tokens[-1][0])}
        found["cached"] = one.decoded["cached"]
        found["between"] = _between(tokens)
    if load is not None:
        moments = {name: after(at) for name, at in load["moments"].items()}
        found["load"] = {**load, "moments": moments}
    return found


def _between(tokens: Sequence[Sequence[float]]) -> list[float]:
    """Seconds from each token to the next; of tokens that come at once all but the first come after 0."""
    found: list[float] = []
    for (before, _), (at, count) in itertools.pairwise(tokens):
        found += [round(at - before, 5), *[0.0] * (int(count) - 1)]
    return found
