"""What part of a prompt's KV leaves while it is computed, how soon after that the decoder may start, and what it costs.

Engines differ from process to process by more than a push costs, so `beside` compares within one engine, in turns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from statistics import median
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


def beside(fleet: Fleet, running: Sequence[Pair], rounds: int) -> None:
    """Prefills alone, to be pulled and pushed, in turns in the same engine; then pushes that are watched.

    What watches takes some of a step, so the times are of the rounds before it.
    """
    for pair in running:
        for tokens in (fleet.sizes.middle, fleet.sizes.long):
            work = functools.partial(_beside, fleet, pair, tokens, rounds)
            tried(fleet, pair, f"beside {tokens}", work)
    for pair in running:
        tried(fleet, pair, "watch", functools.partial(_watch, pair))
    for pair in running:
        for number in range(rounds // 2 + 1):
            note = "steady" if number else "warm"
            for tokens in (fleet.sizes.middle, fleet.sizes.long):
                work = functools.partial(_once, fleet, pair, "push", note, tokens, "watched push")
                tried(fleet, pair, f"watched {tokens} {note}", work)


def _beside(fleet: Fleet, pair: Pair, tokens: int, rounds: int) -> None:
    """Each way first as often as the others: what comes first after a rest may be slower."""

    def alone() -> dict[str, float]:
        return {"prefill": pair.prefill.submit(fresh(tokens), 1).result(60.0).total_seconds}

    def to_be_pulled() -> dict[str, float]:
        asked = ask(pair, "pull", fresh(tokens), 1)
        if asked.error:
            raise RuntimeError(asked.error)
        return {"prefill": asked.prefilled.total_seconds}

    def pushed() -> dict[str, float]:
        asked = ask(pair, "push", fresh(tokens), 1)
        if asked.error:
            raise RuntimeError(asked.error)
        first = asked.decoded.total_seconds
        return {"prefill": asked.prefilled.total_seconds, "first_token": first}

    ways: list[tuple[str, Callable[[], dict[str, float]]]] = [
        ("alone", alone), ("pulled", to_be_pulled), ("pushed", pushed),
    ]  # fmt: skip
    found: dict[str, list[dict[str, float]]] = {name: [] for name, _ in ways}
    for number in range(rounds + 2):
        at = number % len(ways)
        for name, work in (*ways[at:], *ways[:at]):
            one = work()
            if number > 1:
                found[name].append(one)
    seconds = {name: [one["prefill"] for one in some] for name, some in found.items()}
    after = [one["first_token"] - one["prefill"] for one in found["pushed"]]
    fleet.report.note(
        "beside", **about(pair, "push", tokens), note="steady", rounds=rounds, after_prefill=median(after),
        prefills=seconds, **{name: median(some) for name, some in seconds.items()},
    )  # fmt: skip
    middle = {name: f"{1e3 * median(some):.2f}" for name, some in seconds.items()}
    ratio = median(seconds["pushed"]) / median(seconds["alone"])
    apart = f"answers {1e3 * median(after):.2f} ms apart"
    fleet.report.say(f"{pair.spec.name} {tokens}: ms {middle}, pushed over alone {ratio:.3f}, {apart}")


def _watch(pair: Pair) -> None:
    for engine in pair.engines:
        ask_workers(engine, "kvb_watch", False)
        ask_workers(engine, "kvb_watch_moves")


def _once(fleet: Fleet, pair: Pair, mode: Mode, note: str, tokens: int = 0, what: str = "overlap") -> None:
    tokens = tokens or fleet.sizes.long
    for engine in pair.engines:
        ask_workers(engine, "kvb_moves")
    ask_workers(pair.decode, "kvb_loads")
    asked = ask(pair, mode, fresh(tokens), 1)
    moves = [one for engine in pair.engines for worker in ask_workers(engine, "kvb_moves") for one in worker]
    loads = [one for worker in ask_workers(pair.decode, "kvb_loads") for one in worker]
    times = _times(moves, loads)
    if loads:
        times["answer_to_reported"] = max(one["at"] for one in loads) - asked.prefilled_at
    if "part_before_end" in times:
        shown = {
            name: round(value, 5) if isinstance(value, float) else value for name, value in times.items()
        }
        fleet.report.say(f"{pair.spec.name} {mode} {tokens} {note}: {shown}")
    fleet.report.note(
        what,
        **about(pair, mode, tokens),
        note=note,
        error=asked.error,
        prefill=asked.prefilled.total_seconds,
        first_token=asked.decoded.first_token_seconds,
        **record_fields(records(pair, asked.handed_over, pair.spec.tp[1])),
        **times,
    )


def _times(moves: list[dict[str, Any]], loads: list[dict[str, Any]]) -> dict[str, Any]:
    """Share of the bytes gone when the last step of the prefill ended, and seconds from then until they were loaded.

    A pull has no steps that are noted: there only the moving itself is known.
    """
    moved = [(one["at"], one["bytes"]) for one in moves if one["what"] == "moved"]
    steps = [one["at"] for one in moves if one["what"] == "step"]
    total = sum(size for _, size in moved)
    found: dict[str, Any] = {"moved_bytes": total, "posts": len(moved), "steps": len(steps)}
    if moved and steps:
        end = max(steps)
        found["part_before_end"] = sum(size for at, size in moved if at <= end) / total
        found["end_to_last"] = max(at for at, _ in moved) - end
        found["steps_at"] = [round(at - end, 5) for at in steps]
        found["moved_at"] = [(round(at - end, 5), round(size / total, 4)) for at, size in moved]
    if moved and loads:
        found["last_to_reported"] = max(one["at"] for one in loads) - max(at for at, _ in moved)
    if moved and steps and loads:
        found["end_to_reported"] = max(one["at"] for one in loads) - max(steps)
    return found
