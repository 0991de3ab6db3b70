"""Loads that fail: the decoder must live, answer as it does alone, and keep its blocks to itself."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

from benchmarks.gpu.asking import Question, alone, ask, fresh, question, records
from benchmarks.gpu.correctness import about, first_difference, record_fields
from benchmarks.gpu.fleet import Fleet, Pair
from kvctl.demo.deployment import PREFILL_PARAMS
from kvctl.demo.engine import EngineAnswer
from kvd.wire.order import ForcedMisses, ForceMiss, GetForced, NextLoads, When
from tests.support.engine_pids import engine_pids
from tests.support.halting import halted

MISS_SECONDS = 10.0
PAUSE_SECONDS = 5.0
"""How long a prefiller stands still; loads have `fleet` 's options' ``load_timeout``, which must be less."""


def forced(fleet: Fleet, pair: Pair, tokens: int, when: When) -> bool:
    """A load that an operator's order makes miss; whether the answer is the decoder's own."""
    order: Any = pair.hosts[1].ask(
        ForceMiss(
            engine_id=pair.ids[1],
            target=NextLoads(count=1, seconds=60.0),
            when=when,
            carry_out=True,
        )
    )
    asks = question(pair, tokens, fleet.sizes.answer)
    asked = ask(pair, "pull", asks.prompt, fleet.sizes.answer)
    outcome: Any = pair.hosts[1].ask(GetForced(order_id=getattr(order, "order_id", ""), seconds=0.0))
    misses = (
        [(m.state, m.cause) for m in outcome.misses] if isinstance(outcome, ForcedMisses) else str(outcome)
    )
    return _judge(
        fleet, pair, f"force-miss {when}", asks, asked.decoded, asked.handed_over,
        order=str(order)[:300], misses=misses,
    )  # fmt: skip


def stopped(fleet: Fleet, pair: Pair, tokens: int) -> bool:
    """A prefiller that stands still past the load's deadline and then goes on; nothing may land in reused blocks."""
    ask(pair, "pull", fresh(tokens), 1)  # a lane that works
    asks = question(pair, tokens, fleet.sizes.answer)
    prefilled = pair.prefill.submit(asks.prompt, 1, PREFILL_PARAMS).result(30.0)
    others = [fresh(tokens) for _ in range(2)]
    with halted(engine_pids(pair.prefill).executing):
        began = time.monotonic()
        decoded = pair.decode.submit(asks.prompt, fleet.sizes.answer, _here(prefilled)).result(30.0)
        took = time.monotonic() - began
        before = [alone(pair, one, fleet.sizes.answer).token_ids for one in others]
        time.sleep(max(0.0, PAUSE_SECONDS - (time.monotonic() - began)))
    after = [alone(pair, one, fleet.sizes.answer).token_ids for one in others * 2]
    same = after == before * 2
    name = str((prefilled.kv_transfer_params or {}).get("remote_request_id", ""))
    fine = _judge(
        fleet, pair, "stopped, then continued", asks, decoded, name, seconds=took, others_same=same
    )  # fmt: skip
    ask(pair, "pull", fresh(tokens), 1)  # the prefiller is of use again
    return fine and same


def killed(fleet: Fleet, pair: Pair, tokens: int, after: float) -> bool:
    """A prefiller that is killed ``after`` seconds into a load. The pair is of no use any more."""
    asks = question(pair, tokens, fleet.sizes.answer)
    prefilled = pair.prefill.submit(asks.prompt, 1, PREFILL_PARAMS).result(30.0)
    decoding = pair.decode.submit(asks.prompt, fleet.sizes.answer, _here(prefilled))
    time.sleep(after)
    pids = engine_pids(pair.prefill).all[1:]
    for pid in reversed(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    decoded = decoding.result(30.0)
    name = str((prefilled.kv_transfer_params or {}).get("remote_request_id", ""))
    return _judge(fleet, pair, "prefiller killed", asks, decoded, name, after=after, killed=len(pids))


def _here(prefilled: EngineAnswer) -> dict[str, Any]:
    params = dict(prefilled.kv_transfer_params or {})
    params.pop("remote_prefill_cached_tokens", None)
    return params


def _judge(
    fleet: Fleet, pair: Pair, what: str, asks: Question, decoded: EngineAnswer, handed_over: str, **more: Any
) -> bool:
    """Note what became of it; whether the answer is what an engine says alone.

    The decoder, at once or in pieces; where the load was done also the prefiller, whose KV it is.
    """
    own = alone(pair, asks.prompt, fleet.sizes.answer)
    whole = first_difference(decoded.token_ids, own.token_ids)
    pieces = first_difference(decoded.token_ids, asks.in_pieces)
    found = record_fields(records(pair, handed_over)) if handed_over else {}
    there = found.get("state") == "done" and decoded.token_ids == asks.there
    right = not decoded.error and (whole is None or pieces is None or there)
    fleet.report.note(
        "fault",
        **about(pair, "pull", len(asks.prompt)),
        fault=what,
        right=right,
        alive=engine_pids(pair.decode).host is not None and not own.error,
        first_difference=whole,
        first_difference_in_pieces=pieces,
        equals_prefiller_in_pieces=there,
        error=decoded.error,
        took=decoded.total_seconds,
        **more,
        **found,
    )
    fleet.report.say(
        f"{pair.spec.name} {what}: {'right' if right else 'WRONG'} {found.get('state')}"
        f" {found.get('cause', '')[:200]} {decoded.error}"
    )
    return right
