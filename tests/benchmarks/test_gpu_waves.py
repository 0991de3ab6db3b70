"""How benchmarks/gpu orders its work: engines of a wave start together, the quiet part waits, the dead cost nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import waves
from benchmarks.gpu.fleet import SIZES, Fleet, Pair, PairSpec, Way
from benchmarks.gpu.losing import tried
from benchmarks.gpu.report import Report, read
from benchmarks.gpu.stages import STAGES
from benchmarks.gpu.waves import Stage, StageTimeout, run_wave
from kvctl.processes.errors import EngineGone, EngineStartFailed, EngineTimeout

ASK_TWICE = 2


class Engine:
    """One that is up when it was asked often enough, or never starts."""

    def __init__(self, spec: PairSpec, events: list[str]) -> None:
        self.spec, self.events, self.asked, self.dead = spec, events, 0, False

    def wait_ready(self, _: float) -> None:
        if self.spec.way == "mooncake":
            raise EngineStartFailed("no such library")
        self.asked += 1
        if self.asked < ASK_TWICE:
            raise EngineTimeout("still starting")

    def call(self, _: str, method: str, __: tuple[Any, ...]) -> Future[Any]:
        if self.dead:
            raise EngineGone("the engine ended")
        answers: Future[Any] = Future()
        answers.set_result([[] if method == "kvb_geometry" else True])
        return answers

    def stop(self, _: float = 0.0) -> None:
        self.events.append(f"stop {self.spec.kind}")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, with engines that are none."""
    found: list[str] = []

    def begin(_: Fleet, __: Any, spec: PairSpec) -> Pair:
        found.append(f"begin {spec.kind}-{spec.way}")
        hosts: Any = None
        engines: list[Any] = [Engine(spec, found) for _ in range(2)]
        return Pair(spec, engines[0], engines[1], hosts, ("p", "d"))

    @contextlib.contextmanager
    def none() -> Iterator[Any]:
        yield None

    monkeypatch.setattr(waves, "begin_pair", begin)
    monkeypatch.setattr(waves, "engines", none)
    monkeypatch.setattr(waves, "write", lambda _, folder: folder)
    monkeypatch.setattr(waves, "LOOK_SECONDS", 0.001)
    return found


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A fleet without kvds."""
    hosts: Any = None
    report = Report(tmp_path / "out")
    yield Fleet("cpu", SIZES["cpu"], tmp_path, tmp_path, report, 0, hosts)
    report.close()


def stage(name: str, kind: str, ways: Sequence[Way], **works: Any) -> Stage:
    """A stage of pairs of one kind."""
    return Stage(name, lambda _: [PairSpec(kind=kind, way=way) for way in ways], **works)


def verdicts(fleet: Fleet) -> dict[str, Any]:
    """What the report says of each stage."""
    return {line["stage"]: line for line in read([fleet.report.folder]) if line["what"] == "stage"}


def test_what_must_be_quiet_is_done_when_all_else_has_started_and_ended(
    fleet: Fleet, events: list[str]
) -> None:
    def measure(_: Fleet, pairs: Sequence[Pair]) -> dict[str, list[str]]:
        events.append(f"measure {len(pairs)}")
        return {}

    def check(_: Fleet, pair: Pair) -> list[str]:
        events.append(f"check {pair.spec.way}")
        return []

    stages = [
        stage("times", "dense", ("direct", "nixl"), together=measure),
        stage("bytes", "gdn", ("direct",), each=check),
        Stage("bare", lambda _: (), together=measure),
    ]
    assert run_wave(fleet, stages, time.monotonic() + 90) == 0
    order = [event for event in events if not event.startswith("stop")]
    begun = ["begin dense-direct", "begin dense-nixl", "begin gdn-direct"]
    assert order == ["measure 0", *begun, "check direct", "measure 2"]
    assert verdicts(fleet)["times"]["verdict"] == {"dense-direct": "right", "dense-nixl": "right"}


@pytest.mark.usefixtures("events")
def test_a_pair_that_does_not_start_leaves_the_others_their_turn(fleet: Fleet) -> None:
    one = stage("bytes", "dense", ("mooncake", "direct"), each=lambda *_: ["push 505"])
    assert run_wave(fleet, [one], time.monotonic() + 90) == 1
    assert verdicts(fleet)["bytes"]["verdict"] == {
        "dense-mooncake": "did not start",
        "dense-direct": "wrong: push 505",
    }


def test_the_second_wait_in_vain_or_a_dead_engine_ends_a_pair(fleet: Fleet, events: list[str]) -> None:
    def fails(_: Any = None) -> None:
        events.append("asked")
        raise TimeoutError("no answer")

    def each(fleet: Fleet, pair: Pair) -> list[str]:
        pair.decode.dead = pair.spec.way == "nixl"  # type: ignore[attr-defined]
        return [name for name in ("a", "b", "c") if not tried(fleet, pair, name, fails)]

    assert (
        run_wave(fleet, [stage("bytes", "dense", ("direct", "nixl"), each=each)], time.monotonic() + 90) == 1
    )
    assert events.count("asked") == 2 + 1
    said = verdicts(fleet)["bytes"]["verdict"]
    assert said["dense-direct"] == "wrong: a, b, c; lost: no answer in time 2 times, at last in b"
    assert said["dense-nixl"] == "wrong: a, b, c; lost: an engine is dead since a"


@pytest.mark.usefixtures("events")
def test_when_time_is_over_what_was_done_is_said(fleet: Fleet) -> None:
    def ends(_: Fleet, pair: Pair) -> list[str]:
        if pair.spec.way == "direct":
            return []
        raise StageTimeout("3 s are over")

    both = stage("bytes", "dense", ("direct", "nixl"), each=ends)
    late = Stage("late", both.pairs, each=both.each, least=600.0)
    assert run_wave(fleet, [both, late], time.monotonic() + 90) == 2
    said = verdicts(fleet)
    assert said["bytes"]["verdict"] == {"dense-direct": "right", "dense-nixl": "StageTimeout: 3 s are over"}
    assert "late" not in said
    assert [line["stage"] for line in read([fleet.report.folder]) if line["what"] == "skipped"] == ["late"]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_no_two_pairs_of_a_stage_are_named_alike(fleet: Fleet, stage: Stage) -> None:
    names = [spec.name for spec in stage.pairs(fleet)]
    assert len(set(names)) == len(names)
