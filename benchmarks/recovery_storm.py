"""Many requests at once of which a part misses on command: every answer right, nothing left over, time to recover.

    python -m benchmarks.recovery_storm [--model qwen3.5-gdn] [--mode pull] [--requests 200] [--ratio 0.3] [--json]

A prefilling and a decoding engine on this host. Each prompt is first computed by the decoding engine alone, in one
piece and in those of a hand-over, as the two may differ legitimately; then all go through both engines, some in flight
at a time, while an order has a part of their loads miss. Exit code 1 where an answer is none of its two references, a
miss did not recover, or a request or a block is left over. Recovery takes as long as the machine stands still, where
it does: `stood_still` says how long in the storm, at once at most, and `slowest` what that miss waited for.
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

from kvctl.demo.deployment import Deployment, engine_id
from kvctl.demo.engine_spec import EngineSpec
from kvd.wire.order import MISS_ENDS, ForcedMisses, ForceMiss, ForcePlan, GetForced, Miss, NextLoads
from tests.support.deployments import deploy
from tests.support.engine_calls import engine_metrics, reset_prefix_cache
from tests.support.standstill import watching
from tests.support.tiny_models import MODELS, NO_PREFIX_CACHING, ONE_AT_A_TIME, write_model

START_SECONDS, ANSWER_SECONDS, FOLLOW_SECONDS = 600.0, 300.0, 300.0
PATIENT = {"handshake_timeout": 60.0, "push_timeout": 120.0, "load_timeout": 60.0, "lease_seconds": 120.0}
SHORTEST, LONGEST, NEW_TOKENS = 40, 160, 6

T = TypeVar("T")


def main() -> int:
    """Run it and print what came of it."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        found = storm(options, Path(folder))
    if options.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        sys.stdout.writelines(f"{name:<24}{value}\n" for name, value in found.items())
    clean = found["wrong"] == found["failed"] == found["left_running"] == found["left_waiting"] == 0
    return 0 if clean and found["free_again"] and found["recovered"] == found["taken"] else 1


def storm(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of one run; times in seconds."""
    rng = random.Random(options.seed)  # noqa: S311 - to be had again, not to be secret
    prompts = [
        [rng.randrange(10, 500) for _ in range(rng.randint(SHORTEST, LONGEST))]
        for _ in range(options.requests)
    ]
    prefill, decode = (_spec(options, folder, name) for name in ("prefill", "decode"))
    with deploy(
        folder, prefill, decode, mode=options.mode, extra={"backend": options.backend, **PATIENT},
        ready_timeout=START_SECONDS,
    ) as engines:  # fmt: skip
        began = time.monotonic()
        references = _together(options, prompts, lambda prompt: _references(engines, prompt))
        _forget(engines)
        referred = time.monotonic()
        blocks = engine_metrics(engines.decode).free_blocks
        plan = cast("ForcePlan", engines.decode_host.ask(_order(options, engines)))
        with watching(0.5) as stood_still:
            answers = _together(
                options, prompts, lambda prompt: engines.ask(prompt, NEW_TOKENS, ANSWER_SECONDS)
            )
        answered = time.monotonic()
        forced = _followed(engines, plan.order_id)
        free_again = _forget(engines)
        engines.decode.submit(prompts[0], 1).result(ANSWER_SECONDS)  # its last step shows what is held
        last = engine_metrics(engines.decode)
    decoded = [answer.decoded for answer in answers]
    right = [one.token_ids in both for one, both in zip(decoded, references, strict=True)]
    recovered = sorted((m for m in forced.misses if m.state == "recovered"), key=_seconds)
    seconds = [_seconds(miss) for miss in recovered]
    return {
        "model": options.model,
        "mode": options.mode,
        "requests": len(prompts),
        "in_flight": options.in_flight,
        "ratio": options.ratio,
        "looked": forced.order.looked,
        "taken": forced.order.taken,
        "recovered": len(seconds),
        "wrong": right.count(False),
        "failed": sum(bool(one.error) for one in decoded),
        "as_recomputed": sum(one.token_ids == both[0] for one, both in zip(decoded, references, strict=True)),
        "as_handed_over": sum(
            one.token_ids == both[1] for one, both in zip(decoded, references, strict=True)
        ),
        "left_running": int(last.values["vllm:num_requests_running"]),
        "left_waiting": int(last.values["vllm:num_requests_waiting"]),
        "free_blocks_before": blocks,
        "free_blocks_after": last.free_blocks,
        "free_again": free_again,
        "recovery_p50": _percentile(seconds, 0.50),
        "recovery_p99": _percentile(seconds, 0.99),
        "quiesce_p99": _percentile(sorted(_between(forced.misses, "forced", "quiesced")), 0.99),
        "stood_still": max((one.seconds for one in stood_still), default=0.0),
        "slowest": {name: at - recovered[-1].steps["forced"] for name, at in recovered[-1].steps.items()}
        if recovered
        else {},
        "reference_seconds": referred - began,
        "storm_seconds": answered - referred,
    }


def _order(options: argparse.Namespace, engines: Deployment) -> ForceMiss:
    loads = NextLoads(count=options.requests, ratio=options.ratio, seed=options.seed, seconds=3600.0)
    return ForceMiss(
        engine_id=engine_id(engines.decode_host), target=loads, when=options.when, carry_out=True
    )


def _references(engines: Deployment, prompt: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What one engine answers: all of the prompt computed in one piece, and in the pieces of a hand-over."""
    whole = engines.decode.submit(prompt, NEW_TOKENS).result(ANSWER_SECONDS).token_ids
    return whole, engines.decode.submit_alone(prompt, NEW_TOKENS).result(ANSWER_SECONDS).token_ids[1:]


def _together(
    options: argparse.Namespace, prompts: Sequence[Sequence[int]], do: Callable[[Sequence[int]], T]
) -> list[T]:
    with ThreadPoolExecutor(options.in_flight) as threads:
        return list(threads.map(do, prompts))


def _followed(engines: Deployment, order_id: str) -> ForcedMisses:
    """The order when all its misses have ended, or as far as it came."""
    deadline, revision = time.monotonic() + FOLLOW_SECONDS, -1
    while True:
        question = GetForced(order_id=order_id, revision=revision, seconds=1.0)
        forced = cast("ForcedMisses", engines.decode_host.ask(question))
        revision = forced.revision
        ended = sum(miss.state in MISS_ENDS for miss in forced.misses)
        if (not forced.order.open and ended == forced.order.taken) or time.monotonic() > deadline:
            return forced


def _forget(engines: Deployment) -> bool:
    """Whether both engines hold no block any more, waited for; empties their prefix caches."""
    deadline = time.monotonic() + 60.0
    while not all(reset_prefix_cache(engine) for engine in (engines.prefill, engines.decode)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _seconds(miss: Miss) -> float:
    return miss.steps["first_token"] - miss.steps["forced"]


def _between(misses: Sequence[Miss], first: str, last: str) -> list[float]:
    return [m.steps[last] - m.steps[first] for m in misses if first in m.steps and last in m.steps]


def _percentile(ordered: Sequence[float], part: float) -> float | None:
    return ordered[math.ceil(part * len(ordered)) - 1] if ordered else None


def _spec(options: argparse.Namespace, folder: Path, name: str) -> EngineSpec:
    tiny = MODELS[options.model]
    return EngineSpec(
        model=write_model(options.model, folder / "models"),
        work_dir=folder / name,
        log_path=folder / f"{name}.log",
        dtype=tiny.dtype,
        max_model_len=1024,
        max_num_seqs=1 if tiny.name in ONE_AT_A_TIME else options.in_flight,
        enable_prefix_caching=tiny.name not in NO_PREFIX_CACHING,
        forced_first_tokens=name == "decode",
        cache_dir=folder / "cache",
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="qwen3.5-gdn", choices=sorted(MODELS))
    parser.add_argument("--mode", default="pull", choices=("pull", "push"))
    parser.add_argument("--backend", default="nixl")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--ratio", type=float, default=0.3)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--when", default="flight", choices=("now", "before", "flight", "layers"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
