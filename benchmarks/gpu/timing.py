"""How long requests take: the transfer itself and the decoder's first token, ours and vLLM's connectors in turn."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.asking import Mode, alone, ask, fresh, records
from benchmarks.gpu.correctness import about, record_fields
from benchmarks.gpu.fleet import STOCK, Fleet, Pair
from benchmarks.gpu.losing import tried


def warm(fleet: Fleet, running: Sequence[Pair], lengths: Sequence[int]) -> None:
    """Compute prompts of these lengths on all engines, nothing handed over: kernels are compiled, pools filled."""
    for pair in running:
        tried(fleet, pair, "warm", functools.partial(_warm, fleet, pair, lengths))


def _warm(fleet: Fleet, pair: Pair, lengths: Sequence[int]) -> None:
    for tokens in lengths:
        for engine in pair.engines:
            engine.submit(fresh(tokens), 2).result(60.0)
    if pair.spec.way in STOCK:
        for engine in pair.engines:
            engine.ask_workers("kvb_watch_stock")
    fleet.report.say(f"{pair.spec.name}: warm")


def in_turns(fleet: Fleet, running: Sequence[Pair], modes: Sequence[Mode], rounds: int) -> None:
    """A first request of each pair, then every length and mode, the pairs in turn within each round."""
    for pair in running:
        once(fleet, pair, modes[0], fleet.sizes.short, note="first")
    for tokens in fleet.sizes.all:
        for number in range(rounds + 1):
            for pair in running:
                for mode in modes if pair.spec.way not in STOCK else modes[:1]:
                    # The first of a length is not counted: pools of the libraries grow.
                    once(fleet, pair, mode, tokens, note="warm" if number == 0 else "steady")


def once(fleet: Fleet, pair: Pair, mode: Mode, tokens: int, *, note: str) -> None:
    """One request, and beside it a prompt of its length that the decoder computes itself."""
    work = functools.partial(_once, fleet, pair, mode, tokens, note)
    tried(fleet, pair, f"{mode} {tokens} {note}", work)


def _once(fleet: Fleet, pair: Pair, mode: Mode, tokens: int, note: str) -> None:
    if pair.spec.way in STOCK:
        _stock_counts(pair)
    asked = ask(pair, mode, fresh(tokens), 1)
    own = alone(pair, fresh(tokens), 1)
    counted = (
        {"stock": _stock_counts(pair)}
        if pair.spec.way in STOCK
        else record_fields(records(pair, asked.handed_over, pair.spec.tp[1]))
    )
    fleet.report.note(
        "transfer",
        **about(pair, mode, tokens),
        note=note,
        error=asked.error,
        first_token=asked.decoded.first_token_seconds,
        cached_tokens=asked.decoded.num_cached_tokens,
        prefill=asked.prefilled.total_seconds,
        local_first_token=own.first_token_seconds,
        **counted,
    )


def _stock_counts(pair: Pair) -> dict[str, Any]:
    """What the stock connector counted on either side since the last question: the moving side has numbers."""
    found: dict[str, Any] = {}
    for engine in pair.engines:
        for worker in engine.ask_workers("kvb_stock_stats"):
            for name, values in worker.items():
                found.setdefault(name, []).extend(values)
    return {name: values for name, values in found.items() if values}
