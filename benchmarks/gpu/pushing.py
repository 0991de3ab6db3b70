"""What part of a prompt's KV leaves while it is computed, and how soon after that the decoder may start."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.asking import Mode, ask, fresh, records
from benchmarks.gpu.correctness import about, record_fields
from benchmarks.gpu.fleet import Fleet, Pair
from benchmarks.gpu.losing import tried
from tests.support.engine_calls import ask_workers


def overlap(fleet: Fleet, running: Sequence[Pair], rounds: int) -> None:
    """The longest prompt, pushed and pulled in turn, by each of the pairs."""
    for pair in running:
        tried(fleet, pair, "watch", functools.partial(_watch, pair))
    modes: tuple[Mode, Mode] = ("push", "pull")
    for number in range(rounds + 1):
        for pair in running:
            for mode in modes:
                note = "steady" if number else "warm"
                work = functools.partial(_once, fleet, pair, mode, note)
                tried(fleet, pair, f"overlap {mode} {note}", work)


def _watch(pair: Pair) -> None:
    for engine in pair.engines:
        ask_workers(engine, "kvb_watch", False)
        ask_workers(engine, "kvb_watch_moves")


def _once(fleet: Fleet, pair: Pair, mode: Mode, note: str) -> None:
    for engine in pair.engines:
        ask_workers(engine, "kvb_moves")
    ask_workers(pair.decode, "kvb_loads")
    asked = ask(pair, mode, fresh(fleet.sizes.long), 1)
    moves = [one for engine in pair.engines for worker in ask_workers(engine, "kvb_moves") for one in worker]
    loads = [one for worker in ask_workers(pair.decode, "kvb_loads") for one in worker]
    fleet.report.note(
        "overlap",
        **about(pair, mode, fleet.sizes.long),
        note=note,
        error=asked.error,
        prefill=asked.prefilled.total_seconds,
        first_token=asked.decoded.first_token_seconds,
        **record_fields(records(pair, asked.handed_over, pair.spec.tp[1])),
        answer_to_reported=max((one["at"] for one in loads), default=0.0) - asked.prefilled_at,
        **_times(moves, loads),
    )


def _times(moves: list[dict[str, Any]], loads: list[dict[str, Any]]) -> dict[str, Any]:
    """Share of the bytes gone when the last step of the prefill ended, and seconds from then until they were loaded.

    A pull has no steps that are noted: there only the moving itself is known.
    """
    moved = [(one["at"], one["bytes"]) for one in moves if one["what"] == "moved"]
    steps = [one["at"] for one in moves if one["what"] == "step"]
    total = sum(size for _, size in moved)
    found: dict[str, Any] = {"moved_bytes": total, "posts": len(moved), "steps": len(steps)}
    if moved and loads:
        found["last_to_reported"] = max(one["at"] for one in loads) - max(at for at, _ in moved)
    if moved and steps and loads:
        end = max(steps)
        found["part_before_end"] = sum(size for at, size in moved if at <= end) / total
        found["end_to_reported"] = max(one["at"] for one in loads) - end
        found["end_to_last"] = max(at for at, _ in moved) - end
    return found
