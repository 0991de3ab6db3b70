"""What becomes of a pair whose engines fail: it is noted, and nobody waits in vain for it a third time."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.gpu.fleet import Fleet, Pair
from kvctl.processes.errors import EngineError
from kvd.client.errors import ClientError
from tests.support.engine_calls import ask_workers

MOST_WAITS = 2
ANSWERS_SECONDS = 5.0


def tried(fleet: Fleet, pair: Pair, name: str, work: Callable[[], object]) -> bool:
    """Do one piece of work with a pair: True where it went well and was not called False.

    What it raises is noted. A pair that no longer answers, or that was waited for in vain for the second time, is lost;
    work with a lost pair is not begun.
    """
    if pair.lost:
        return False
    try:
        return work() is not False
    except (EngineError, ClientError, TimeoutError, OSError, RuntimeError, KeyError, IndexError) as error:
        text = f"{type(error).__name__}: {error}"
        fleet.report.note("failed", pair=pair.spec.name, work=name, error=text[-4000:])
        fleet.report.say(f"{pair.spec.name} {name}: {text[:1500]}")
        pair.waits += isinstance(error, TimeoutError)
        if not answers(pair):
            pair.lost = f"an engine is dead since {name}"
        elif pair.waits >= MOST_WAITS:
            pair.lost = f"no answer in time {pair.waits} times, at last in {name}"
        return False


def answers(pair: Pair) -> bool:
    """Whether both engines still answer."""
    try:
        for engine in pair.engines:
            ask_workers(engine, "kvb_answer", timeout=ANSWERS_SECONDS)
    except (EngineError, TimeoutError, RuntimeError):
        return False
    return True
