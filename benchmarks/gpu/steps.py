"""What a connector costs an engine's steps: none, idle, and busy, engines in turn."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from benchmarks.gpu.asking import ask, fresh
from benchmarks.gpu.correctness import about
from benchmarks.gpu.fleet import STOCK, Fleet, Pair
from benchmarks.gpu.losing import tried
from kvctl.demo.deployment import PREFILL_PARAMS
from kvctl.demo.engine import EngineAnswer

AT_ONCE = 8
"""Answers that are decoded together."""


def measure(fleet: Fleet, running: Sequence[Pair], rounds: int) -> None:
    """Decode steps of all decoders, idle; then of each one while it loads long prompts; then prefills."""
    tokens = 256 if fleet.device == "cuda" else 32
    loads = 6 if fleet.device == "cuda" else 2
    for number in range(rounds + 1):
        note = "steady" if number else "warm"
        at = number % len(running)
        for pair in (*running[at:], *running[:at]):
            works = {"idle": functools.partial(_decode, fleet, pair, tokens, 0, note)}
            if pair.spec.way not in (*STOCK, "none"):
                works["busy"] = functools.partial(_decode, fleet, pair, tokens, loads, note)
            works["prefill"] = functools.partial(_prefill, fleet, pair, note)
            for name, work in works.items():
                tried(fleet, pair, name, work)


def _decode(fleet: Fleet, pair: Pair, tokens: int, loads: int, note: str) -> None:
    """Decode some answers together; meanwhile load prompts that are prefilled already, one after the other."""
    length = fleet.sizes.long if pair.spec.longest == 0 else pair.spec.longest
    ready = [pair.prefill.submit(fresh(length), 1, PREFILL_PARAMS) for _ in range(min(loads, 2))]
    prompts = [fresh(fleet.sizes.short // 4) for _ in range(AT_ONCE)]
    offered = [one.result(60.0) for one in ready]
    began = time.monotonic()
    answers = [pair.decode.submit(one, tokens) for one in prompts]
    loading: list[Future[EngineAnswer]] = []
    for prefilled in offered:
        params = dict(prefilled.kv_transfer_params or {})
        params.pop("remote_prefill_cached_tokens", None)
        time.sleep(0.05)
        loading.append(pair.decode.submit(fresh(length), 1, params))
    done = [one.result(60.0) for one in answers]
    wall = time.monotonic() - began
    taken = [(one.total_seconds - (one.first_token_seconds or 0.0)) / (tokens - 1) for one in done]
    loaded = [one.result(60.0) for one in loading]
    fleet.report.note(
        "decode steps",
        **about(pair, pair.spec.mode, tokens),
        note=note,
        busy=bool(loads),
        loads=[one.total_seconds for one in loaded],
        errors=[one.error for one in (*done, *loaded) if one.error],
        step=sorted(taken)[len(taken) // 2],
        wall=wall,
    )


def _prefill(fleet: Fleet, pair: Pair, note: str) -> None:
    """A long prefill for nobody, and where the connector pushes one that is pushed."""
    length = fleet.sizes.long if pair.spec.longest == 0 else pair.spec.longest
    found: dict[str, Any] = {}
    found["alone"] = pair.prefill.submit(fresh(length), 1).result(60.0).total_seconds
    if pair.spec.way != "none" and pair.spec.mode == "push":
        found["pushed"] = ask(pair, "push", fresh(length), 1).prefilled.total_seconds
    fleet.report.note("prefill", **about(pair, pair.spec.mode, length), note=note, **found)
