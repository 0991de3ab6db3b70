"""How long requests take: the transfer itself and the decoder's first token, ours and vLLM's connectors in turn."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.asking import ANSWER_SECONDS, Legs, Mode, alone, ask, fresh, legs_of, records
from benchmarks.gpu.correctness import about, record_fields
from benchmarks.gpu.fleet import STOCK, Fleet, Pair
from benchmarks.gpu.losing import tried
from benchmarks.serving.in_host import SERVE
from kvctl.demo.engine import EngineProcess
from kvd.wire.handshake import GetPeer
from tests.support.engine_calls import ask_workers

CONNECT_SECONDS = 15.0
WARM_PROMPTS, WARM_ANSWER = 10, 4
"""Prompts, and the tokens of each answer: a hand-over's step computes a single token, as only steps of answers do."""


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
            ask_workers(engine, "kvb_watch_stock")
    fleet.report.say(f"{pair.spec.name}: warm")


def in_turns(fleet: Fleet, running: Sequence[Pair], modes: Sequence[Mode], rounds: int) -> None:
    """A first request of each pair, then every length and mode, the pairs in turn within each round.

    The first is one between engines that are up, warm and, where they are ours, introduced to each other.
    """
    for pair in running:
        tried(fleet, pair, "introduce", functools.partial(introduce, fleet, pair))
    for pair in running:
        once(fleet, pair, modes[0], fleet.sizes.short, note="first")
    for tokens in fleet.sizes.all:
        for number in range(rounds + 1):
            for pair in running:
                for mode in modes if pair.spec.way not in STOCK else modes[:1]:
                    # The first of a length is not counted: pools of the libraries grow.
                    once(fleet, pair, mode, tokens, note="warm" if number == 0 else "steady")


def firsts(fleet: Fleet, running: Sequence[Pair], mode: Mode, tokens: int, rounds: int) -> None:
    """A first request of each pair and later ones right after it, one pair after the other.

    An engine that has just started, or that rested, is slower at anything; so both compute prompts of this length until
    the first request comes. They are asked as it is, since the first question of its kind has a host import `SERVE`.
    """
    for pair in running:
        tried(fleet, pair, "introduce", functools.partial(introduce, fleet, pair))
        tried(fleet, pair, "warm", functools.partial(_warm_as_asked, fleet, pair, tokens))
        for number in range(rounds + 1):
            note = "later" if number else "first"
            work = functools.partial(_first, fleet, pair, mode, tokens, note)
            tried(fleet, pair, f"{mode} {tokens} {note}", work)


def _warm_as_asked(fleet: Fleet, pair: Pair, tokens: int) -> None:
    for _ in range(WARM_PROMPTS):
        for engine in pair.engines:
            _split(engine, "warm", fresh(tokens), None, WARM_ANSWER)
    fleet.report.say(f"{pair.spec.name}: warm")


def introduce(fleet: Fleet, pair: Pair) -> None:
    """Hand both engines each other, as kvd does by itself for the kvds of its ``peer.connect``, and let them connect.

    vLLM's own connectors know no such thing: each meets its peer in the first request.
    """
    if pair.spec.way in (*STOCK, "none"):
        return
    for here, there in ((1, 0), (0, 1)):
        pair.hosts[here].ask(
            GetPeer(
                local_engine=pair.ids[here],
                engine_id=pair.ids[there],
                endpoint=pair.hosts[there].endpoint(),
            )
        )
    until = time.monotonic() + CONNECT_SECONDS
    while not all(ask_workers(pair.decode, "kvb_connected", pair.ids[0])):
        if time.monotonic() > until:
            fleet.report.say(f"{pair.spec.name}: introduced, but not connected within {CONNECT_SECONDS:g} s")
            return
        time.sleep(0.05)
    fleet.report.say(f"{pair.spec.name}: introduced")


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


def _first(fleet: Fleet, pair: Pair, mode: Mode, tokens: int, note: str) -> None:
    """As `once`; and where the decoder's time went, for the request and for the prompt that it computes itself."""
    asked = fresh(tokens)
    legs: Legs = legs_of(pair, mode)()
    prefilled = pair.prefill.submit(asked, 1, legs.there).result(ANSWER_SECONDS)
    params, name = legs.handed(prefilled.kv_transfer_params)
    split = _split(pair.decode, name, asked, params)
    own = _split(pair.decode, f"{name}-own", fresh(tokens), None)
    ours = pair.spec.way not in STOCK
    fleet.report.note(
        "transfer",
        **about(pair, mode, tokens),
        note=note,
        error=prefilled.error,
        first_token=sum(split.values()),
        prefill=prefilled.total_seconds,
        local_first_token=sum(own.values()),
        split=split,
        local_split=own,
        **(record_fields(records(pair, name, pair.spec.tp[1])) if ours else {}),
    )


def _split(
    engine: EngineProcess,
    name: str,
    tokens: Sequence[int],
    params: dict[str, Any] | None,
    answer: int = 1,
) -> dict[str, float]:
    """Seconds until the engine's core had a request, until its first step, until its token, until that was here."""
    request = {"id": f"{name}-{time.monotonic_ns()}", "prompt_token_ids": list(tokens), "max_tokens": answer}
    found = engine.call(SERVE, {**request, "kv_transfer_params": params}).result(ANSWER_SECONDS)
    at = [found["got"], found["queued"], found["scheduled"], found["first"], found["tokens"][0][0]]
    names = ("to the core", "to the step", "step", "answer")
    return {what: later - sooner for what, sooner, later in zip(names, at, at[1:], strict=False)}


def _stock_counts(pair: Pair) -> dict[str, Any]:
    """What the stock connector counted on either side since the last question: the moving side has numbers."""
    found: dict[str, Any] = {}
    for engine in pair.engines:
        for worker in ask_workers(engine, "kvb_stock_stats"):
            for name, values in worker.items():
                found.setdefault(name, []).extend(values)
    return {name: values for name, values in found.items() if values}
