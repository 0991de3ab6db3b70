"""The router and its clients in one: sends prompts through a pair when their time has come, and notes what happened."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.gpu.asking import Legs, fresh
from benchmarks.gpu.fleet import Pair
from benchmarks.serving.cells import PlannedPrompt, ServingCell
from benchmarks.serving.in_host import SERVE
from kvctl.demo.engine import EngineProcess
from kvctl.processes.errors import EngineError

ANSWER_SECONDS = 20.0
"""For the answers that are still out when the last prompt of a cell has been sent, or for one by itself."""
_numbers = itertools.count(1)
_LOCK = threading.Lock()


@dataclass(slots=True)
class RoutedPrompt:
    """One request: times of this process are time.monotonic(), those of engines stand in their answers.

    ``sent`` and ``handed`` are when the router sent the prompt, and when the prefiller's answer was here.
    ``handed_over`` is what the decoder's ledger calls the prefiller's part. ``left`` answers are out; ``done`` ends
    when none is.
    """

    planned: PlannedPrompt
    prompt: list[int]
    answer: int
    sent: float = 0.0
    handed: float = 0.0
    handed_over: str = ""
    prefilled: Mapping[str, Any] | None = None
    decoded: Mapping[str, Any] | None = None
    error: str = ""
    left: int = 2
    done: Future[None] = field(default_factory=Future)


def run_cell(
    pair: Pair, legs: Callable[[], Legs] | None, cell: ServingCell, planned: Sequence[PlannedPrompt]
) -> list[RoutedPrompt]:
    """Send these prompts; all of them with what became of them. Without legs the decoder does all of it.

    Raises `TimeoutError` where an answer does not come; the others are lost with it.
    """
    asked = [RoutedPrompt(each, fresh(each.tokens), cell.answer) for each in planned]
    began = time.monotonic()
    for one in asked:
        time.sleep(max(0.0, began + one.planned.after - time.monotonic()))
        send(pair, legs() if legs is not None else None, one)
        if not cell.rate:
            one.done.result(ANSWER_SECONDS)
    until = time.monotonic() + ANSWER_SECONDS
    for one in asked:
        one.done.result(max(0.0, until - time.monotonic()))
    return asked


def send(pair: Pair, legs: Legs | None, one: RoutedPrompt) -> None:
    """Send one prompt on its way and return; what comes back is dealt with in the threads that read from engines."""
    one.sent = time.monotonic()
    if legs is None:
        one.left = 1
        _decode(pair, one, None)
        return
    if legs.at_once:
        here, one.handed_over = legs.handed(None)
        # The decoder first: its blocks are then known when the prefill begins.
        _decode(pair, one, here)
    _ask(pair.prefill, one, 1, legs.there, partial(_prefilled, pair, legs, one))


def _prefilled(pair: Pair, legs: Legs, one: RoutedPrompt, answer: Mapping[str, Any] | None) -> int:
    """Send the prompt on to the decoder; how many answers need not be waited for any more."""
    one.handed = time.monotonic()
    one.prefilled = answer
    if legs.at_once:
        return 1
    if answer is None:
        return 2
    here, one.handed_over = legs.handed(answer["kv_transfer_params"])
    _decode(pair, one, here)
    return 1


def _decode(pair: Pair, one: RoutedPrompt, params: Mapping[str, Any] | None) -> None:
    _ask(pair.decode, one, one.answer, params, partial(_decoded, one))


def _decoded(one: RoutedPrompt, answer: Mapping[str, Any] | None) -> int:
    one.decoded = answer
    return 1


def _ask(
    engine: EngineProcess,
    one: RoutedPrompt,
    most: int,
    params: Mapping[str, Any] | None,
    take: Callable[[Mapping[str, Any] | None], int],
) -> None:
    request = {
        "id": f"served-{next(_numbers)}",
        "prompt_token_ids": one.prompt,
        "max_tokens": most,
        "kv_transfer_params": None if params is None else dict(params),
    }
    try:
        engine.call(SERVE, request).add_done_callback(partial(_answered, one, take))
    except EngineError as error:
        one.error = str(error)
        _end(one, 2)


def _answered(
    one: RoutedPrompt, take: Callable[[Mapping[str, Any] | None], int], answer: Future[dict[str, Any]]
) -> None:
    found: dict[str, Any] | None = None
    try:
        found = answer.result()
    except (RuntimeError, EngineError) as error:
        one.error = one.error or str(error)
    _end(one, take(found))


def _end(one: RoutedPrompt, answers: int) -> None:
    """So many answers need not be waited for any more; both halves' threads come here."""
    with _LOCK:
        before, one.left = one.left, one.left - answers
    if before > 0 >= one.left:
        one.done.set_result(None)
