"""Runs stages in waves: all engines of a wave start together, and each is measured as soon as it may be."""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.gpu.fleet import NOT_OURS, Fleet, Pair, PairSpec, begin_pair
from benchmarks.gpu.models import write
from kvctl.demo.deployment import Start, engines
from kvctl.processes.errors import EngineError, EngineTimeout
from tests.support.engine_calls import ask_workers

START_SECONDS = 240.0
STOP_SECONDS = 4.0
LOOK_SECONDS = 0.1

Each = Callable[[Fleet, Pair], Sequence[str]]
Together = Callable[[Fleet, Sequence[Pair]], Mapping[str, Sequence[str]]]


class StageTimeout(Exception):
    """A stage's time is up."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of a run: the pairs it needs, and what is done with them.

    ``each`` is done with a pair as soon as it is up, which then ends; other engines may be starting meanwhile.
    ``together`` is done with all pairs that came up while nothing else happens on the machine; without pairs, before
    engines start. Both say what was wrong, by pair. ``seconds`` is the most that one of them may take, ``least`` what
    must be left to begin at all, ``gpus`` what it needs, ``usual`` whether it runs unasked.
    """

    name: str
    pairs: Callable[[Fleet], Sequence[PairSpec]]
    each: Each | None = None
    together: Together | None = None
    seconds: float = 60.0
    least: float = 60.0
    gpus: int = 0
    usual: bool = True


@dataclass(slots=True)
class _Going:
    """A stage under way; ``verdict`` is by pair."""

    stage: Stage
    waiting: deque[PairSpec]
    starting: list[Pair] = field(default_factory=list)
    up: list[Pair] = field(default_factory=list)
    verdict: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""
    closed: bool = False

    @property
    def over(self) -> bool:
        return not (self.waiting or self.starting or self.up)


def run_wave(fleet: Fleet, stages: Sequence[Stage], ends: float) -> int:
    """Run these stages until they are done or ``ends`` (time.monotonic()); how many of them failed."""
    going = [_Going(stage, _wanted(fleet, stage)) for stage in stages if _fits(fleet, stage, ends)]
    failed = len([stage for stage in stages if not _lacks(fleet, stage)]) - len(going)
    fleet.report.say(f"begins: {', '.join(one.stage.name for one in going)}; {ends - time.monotonic():.0f} s")
    kinds = list(dict.fromkeys(spec.kind for one in going for spec in one.waiting))
    try:
        # Models are written while what needs no engines is measured.
        with _writing(fleet, kinds) as written, engines() as start, ThreadPoolExecutor(16) as ending:
            for one in going:
                if one.over:
                    _together(fleet, one, ends)
                    _close(fleet, one)
            while not all(one.closed for one in going):
                _in_time(ends)
                _begin(fleet, start, going, written)
                _turn(fleet, going, ends, ending)
    except StageTimeout as error:
        fleet.report.say(str(error))
    for one in going:
        if not one.closed:
            one.error = one.error or "time was over"
            _close(fleet, one)
    return failed + sum(bool(one.error) for one in going)


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise `StageTimeout` in the main thread when time is up."""

    def over(_signal: int, _frame: FrameType | None) -> None:
        raise StageTimeout(f"{seconds:.0f} s are over")

    before: Any = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _wanted(fleet: Fleet, stage: Stage) -> deque[PairSpec]:
    return deque(filter(fleet.wants, stage.pairs(fleet)))


def _fits(fleet: Fleet, stage: Stage, ends: float) -> bool:
    left = ends - time.monotonic()
    why = ""
    if _lacks(fleet, stage):
        why = f"needs {stage.gpus} GPUs, there are {fleet.gpus}"
    elif left < stage.least:
        why = f"{left:.0f} s are left, it needs {stage.least:g}"
    if why:
        fleet.report.stage = stage.name
        fleet.report.note("skipped", why=why)
        fleet.report.say(f"{stage.name}: skipped, {why}")
    return not why


def _lacks(fleet: Fleet, stage: Stage) -> bool:
    """Whether a stage needs more GPUs than there are; workers on CPUs need none."""
    return fleet.device == "cuda" and fleet.gpus < stage.gpus


def _in_time(ends: float) -> None:
    if time.monotonic() > ends:
        raise StageTimeout("the time for all stages is over")


@contextlib.contextmanager
def _writing(fleet: Fleet, kinds: Sequence[str]) -> Iterator[dict[str, Future[Path]]]:
    """Have the models written one after the other in the order in which they are needed."""
    with ThreadPoolExecutor(1) as threads:
        folder = fleet.lasting / "models"
        try:
            yield {kind: threads.submit(write, fleet.kinds[kind], folder) for kind in kinds}
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _begin(fleet: Fleet, start: Start, going: Sequence[_Going], written: Mapping[str, Future[Path]]) -> None:
    """Begin to start pairs in the order of stages, as many as the machine has processors for."""
    for one in going:
        while one.waiting:
            spec = one.waiting[0]
            busy = sum(sum(pair.spec.tp) for each in going for pair in each.starting)
            if (busy and busy + sum(spec.tp) > fleet.at_once) or not written[spec.kind].done():
                return
            fleet.report.stage = one.stage.name
            one.waiting.popleft()
            try:
                written[spec.kind].result()
                one.starting.append(begin_pair(fleet, start, spec))
            except Exception as error:  # noqa: BLE001 - other pairs are still worth starting
                _not_started(fleet, one, spec, error)


def _turn(fleet: Fleet, going: Sequence[_Going], ends: float, ending: ThreadPoolExecutor) -> None:
    """Look what has started, do one thing or wait a little, and close what is over."""
    for one in going:
        _take_up(fleet, one, ending)
    if not _one_work(fleet, going, ends, ending):
        time.sleep(LOOK_SECONDS)
    for one in going:
        if one.over and not one.closed:
            _close(fleet, one)


def _take_up(fleet: Fleet, one: _Going, ending: ThreadPoolExecutor) -> None:
    """Sort out which pairs have started, and which will not."""
    for pair in list(one.starting):
        fleet.report.stage = one.stage.name
        try:
            for engine in pair.engines:
                engine.wait_ready(0.0)
            one.starting.remove(pair)
            _up(fleet, pair)
            one.up.append(pair)
        except EngineTimeout as error:
            if time.monotonic() - pair.began > START_SECONDS:
                one.starting.remove(pair)
                _not_started(fleet, one, pair.spec, error)
                _end(fleet, pair, ending)
        except (EngineError, RuntimeError, TimeoutError) as error:
            if pair in one.starting:
                one.starting.remove(pair)
            _not_started(fleet, one, pair.spec, error)
            _end(fleet, pair, ending)


def _up(fleet: Fleet, pair: Pair) -> None:
    seconds = round(time.monotonic() - pair.began, 1)
    ours = pair.spec.way not in (*NOT_OURS, "none")
    geometry = ask_workers(pair.decode, "kvb_geometry")[0] if ours else []
    fleet.running.append(pair)
    fleet.report.note("started", pair=pair.spec.name, seconds=seconds, geometry=geometry)
    fleet.report.say(f"{pair.spec.name} is up after {seconds} s")


def _not_started(fleet: Fleet, one: _Going, spec: PairSpec, error: Exception) -> None:
    one.verdict[spec.name] = "did not start"
    fleet.report.note("not started", pair=spec.name, error=str(error)[-6000:])
    fleet.report.say(f"{spec.name} did not start: {str(error)[-1500:]}")


def _one_work(fleet: Fleet, going: Sequence[_Going], ends: float, ending: ThreadPoolExecutor) -> bool:
    """Do the next thing that can be done; False where there is nothing."""
    for one in going:
        if one.stage.each is not None and one.up:
            pair = one.up.pop(0)
            _each(fleet, one, one.stage.each, pair, ends)
            _end(fleet, pair, ending)
            return True
    if any(one.starting or one.waiting for one in going):
        return False
    for one in going:
        if one.up:
            _together(fleet, one, ends)
            for pair in one.up:
                _end(fleet, pair, ending)
            one.up.clear()
            return True
    return False


def _each(fleet: Fleet, one: _Going, each: Each, pair: Pair, ends: float) -> None:
    with _work(fleet, one, ends):
        wrong = each(fleet, pair)
        one.verdict[pair.spec.name] = _said(pair, wrong)
    one.verdict.setdefault(pair.spec.name, one.error)


def _together(fleet: Fleet, one: _Going, ends: float) -> None:
    with _work(fleet, one, ends):
        wrong = one.stage.together(fleet, one.up) if one.stage.together is not None else {}
        one.verdict |= {pair.spec.name: _said(pair, wrong.get(pair.spec.name, ())) for pair in one.up}
    one.verdict |= {pair.spec.name: one.error for pair in one.up if pair.spec.name not in one.verdict}


@contextlib.contextmanager
def _work(fleet: Fleet, one: _Going, ends: float) -> Iterator[None]:
    """Work of a stage within its time; what it raises is a result, and the next is done all the same."""
    report = fleet.report
    report.stage = one.stage.name
    began = time.monotonic()
    seconds = min(one.stage.seconds * (1 if fleet.device == "cuda" else 4), ends - began)
    try:
        with limit(seconds):
            yield
    except Exception as error:  # noqa: BLE001 - see above
        one.error = f"{type(error).__name__}: {error}"[:4000]
        report.say(f"{one.stage.name}: FAILED {traceback.format_exc()[-2000:]}")
    finally:
        one.seconds += time.monotonic() - began


def _said(pair: Pair, wrong: Sequence[str]) -> str:
    parts = [f"wrong: {', '.join(wrong)}"] if wrong else []
    return "; ".join(parts + ([f"lost: {pair.lost[:200]}"] if pair.lost else [])) or "right"


def _end(fleet: Fleet, pair: Pair, ending: ThreadPoolExecutor) -> None:
    """End a pair while others go on."""
    fleet.running = [one for one in fleet.running if one is not pair]
    for engine in pair.engines:
        ending.submit(engine.stop, STOP_SECONDS)


def _close(fleet: Fleet, one: _Going) -> None:
    """Say what came of a stage, by pair."""
    one.closed = True
    report = fleet.report
    report.stage = one.stage.name
    for spec in one.waiting:
        one.verdict.setdefault(spec.name, "was not begun")
    for pair in (*one.starting, *one.up):
        one.verdict.setdefault(pair.spec.name, "was not done")
    bad = {name: said for name, said in one.verdict.items() if said != "right"}
    if bad and not one.error:
        one.error = "; ".join(f"{name} {said}" for name, said in bad.items())[:4000]
    report.note("stage", seconds=round(one.seconds, 1), error=one.error, verdict=one.verdict)
    for name, said in one.verdict.items():
        report.say(f"{one.stage.name}: {name}: {said[:600]}")
    report.say(f"{one.stage.name}: {'failed' if one.error else 'done'}, {one.seconds:.1f} s of work")
